"""A layer's experts: their outputs against the reference, a graph replayed for other routes, and their times.

The times stand beside what reading the weights of the chosen experts takes, and are those of replayed CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.timing.floors import Work
from benchmarks.gpu.timing.graphs import captured
from benchmarks.limits.model_shape import ModelShape
from benchmarks.machine import median_seconds
from kernels.experts import reference
from kernels.experts.experts import routed_experts
from kernels.experts.route import route

__all__ = ["run"]

MODEL = "moe"
CHECKED = (1, 17, 100, 300)  # tokens
TIMED = (1, 4, 16, 64, 256, 2048)
WORST = 1e9
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of the largest output


class Layer:
    """One layer's experts with random weights, and tokens."""

    def __init__(self, shape: ModelShape, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self._dtype, self._device = dtype, device
        self.top_k = shape.experts_per_token
        self.hidden = self.random(num_tokens, shape.hidden_size)
        self.logits = self.random(num_tokens, shape.num_experts)
        scale = shape.hidden_size**-0.5
        self.gate_up = self.random(shape.num_experts, 2 * shape.expert_size, shape.hidden_size, scale=scale)
        self.down = self.random(shape.num_experts, shape.hidden_size, shape.expert_size, scale=scale)

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        numbers = torch.empty(shape, dtype=self._dtype, device=self._device)
        return numbers.normal_(0.0, scale, generator=self._generator)

    def compute(self, num_tokens: int) -> torch.Tensor:
        tokens = slice(0, num_tokens)
        weights = (self.gate_up, self.down)
        return routed_experts(self.hidden[tokens], self.logits[tokens], *weights, self.top_k, normalize=True)

    def error(self, output: torch.Tensor) -> float:
        """Return the largest difference from the reference's output of the first tokens, as a share of the largest.

        It is 1e9 at most, and if an output is NaN.
        """
        tokens = slice(0, len(output))
        routed = reference.route(self.logits[tokens], self.top_k, normalize=True)
        expected = reference.experts(self.hidden[tokens], self.gate_up, self.down, *routed).double()
        error = float((output.double() - expected).abs().max() / expected.abs().max())
        return error if error < WORST else WORST

    def work(self, num_tokens: int) -> Work:
        ids = route(self.logits[:num_tokens], self.top_k, normalize=True)[1]
        expert = self.gate_up[0].numel() + self.down[0].numel()
        used = len(torch.unique(ids))
        return Work(num_bytes=self.hidden.element_size() * used * expert, flop=2 * ids.numel() * expert)


def run(part: PartRun) -> None:
    """Check both dtypes, then record the times in bfloat16."""
    shape = part.sizes.models[MODEL]
    for dtype in TOLERANCES:
        layer = Layer(shape, max(CHECKED), dtype, part.device)
        for num_tokens in CHECKED:
            _judge(part, f"{dtype}, {num_tokens} tokens", layer.error(layer.compute(num_tokens)), TOLERANCES[dtype])
        _judge(part, f"{dtype}, replayed for other routes", _replayed_error(part, layer), TOLERANCES[dtype])
        if part.on_gpu:  # on a CPU torch computes, whose sums depend on the number of tokens
            _check_bits(part, layer)
    layer = Layer(shape, max(TIMED), torch.bfloat16, part.device)
    lines = []
    for num_tokens in TIMED:
        figures = _measure(part, layer, num_tokens)
        part.record(f"{num_tokens} tokens", figures)
        lines.append(
            f"{num_tokens:5} tokens: {figures['milliseconds']:7.3f} ms, floor {figures['floor_milliseconds']:7.3f}"
        )
        part.record("summary", lines)


def _judge(part: PartRun, name: str, error: float, tolerance: float) -> None:
    part.record(f"error, {name}", error)
    if error > tolerance:
        part.fault(f"{name}: the largest error is {error:.3g} of the largest output, tolerance {tolerance:.3g}")


def _replayed_error(part: PartRun, layer: Layer) -> float:
    outputs: list[torch.Tensor] = []
    num_tokens = CHECKED[1]
    replay = captured(lambda: outputs.append(layer.compute(num_tokens)), part.device)
    for tensor in (layer.hidden, layer.logits):
        tensor.copy_(layer.random(*tensor.shape))
    for output in outputs:
        output.fill_(torch.nan)
    replay()
    return layer.error(outputs[-1])


def _check_bits(part: PartRun, layer: Layer) -> None:
    together = layer.compute(max(CHECKED))
    for num_tokens in CHECKED:
        if not torch.equal(layer.compute(num_tokens), together[:num_tokens]):
            part.fault(f"{layer.hidden.dtype}: tokens have other bits among {num_tokens} than among {len(together)}")


def _measure(part: PartRun, layer: Layer, num_tokens: int) -> dict[str, Any]:
    layer.compute(num_tokens)  # compiles
    seconds = median_seconds(captured(lambda: layer.compute(num_tokens), part.device), part.device)
    return layer.work(num_tokens).figures(seconds, part.limits)
