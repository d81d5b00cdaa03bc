"""A layer's experts on codes of a few bits: against their decoded weights, and their times beside those in bfloat16.

The times stand beside what reading the codes of the chosen experts takes, and are those of replayed CUDA graphs.
"""

from __future__ import annotations

import torch

from benchmarks.gpu.inputs.coded_layers import FORMATS, random_matrix
from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.timing.floors import Work
from benchmarks.gpu.timing.graphs import captured
from benchmarks.limits.model_shape import ModelShape
from benchmarks.machine import median_seconds
from kernels.coded_weight import CodedWeight, CodeFormat, decode
from kernels.experts.coded_stack import CodedStack
from kernels.experts.experts import routed_experts
from kernels.experts.route import route

__all__ = ["MODEL", "Layer", "run"]

MODEL = "moe"
CHECKED = (1, 17, 100, 300)  # tokens, in tiles of each size
TIMED = (1, 4, 16, 64, 256, 2048)
TOLERANCE = 2e-2  # of the norm of the outputs of decoded weights, which are rounded to bfloat16


class Layer:
    """One layer's experts on random codes, and tokens; all experts of a product have the same weights."""

    def __init__(self, shape: ModelShape, form: CodeFormat, num_tokens: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        options: dict[str, object] = {"generator": generator, "device": device, "dtype": torch.bfloat16}
        self.hidden = torch.randn(num_tokens, shape.hidden_size, **options)  # type: ignore[call-overload]
        self.logits = torch.randn(num_tokens, shape.num_experts, **options)  # type: ignore[call-overload]
        self.top_k, self._num_experts, self._device = shape.experts_per_token, shape.num_experts, device
        self.up, self._up = self._stack(form, 2 * shape.expert_size, shape.hidden_size)
        self.down, self._down = self._stack(form, shape.hidden_size, shape.expert_size)

    def _stack(self, form: CodeFormat, outputs: int, inputs: int) -> tuple[CodedStack, torch.Tensor]:
        """Return experts whose outputs differ by a rotation, and the decoded weights of the first one."""
        matrix = random_matrix(form, outputs, inputs, self._device)
        stack: CodedStack | None = None
        for expert in range(self._num_experts):
            own = matrix.rows((torch.arange(outputs, device=self._device) + expert) % outputs)
            section = CodedStack.section(CodedWeight((own,)), outputs, self._device)
            stack = stack or CodedStack(section, self._num_experts)
            stack.set_expert(expert, section)
        assert stack is not None
        on_cpu = matrix.with_parts({name: part.cpu() for name, part in matrix.parts.items()})
        return stack, decode(on_cpu).to(self._device, torch.bfloat16)

    @property
    def num_bytes(self) -> int:
        """Bytes of an expert's codes."""
        parameters = (*self.up.parameters(), *self.down.parameters())
        return sum(parameter.nbytes for parameter in parameters) // self._num_experts

    def compute(self, num_tokens: int) -> torch.Tensor:
        tokens = slice(0, num_tokens)
        return routed_experts(self.hidden[tokens], self.logits[tokens], self.up, self.down, self.top_k, normalize=True)

    def error(self, output: torch.Tensor) -> float:
        """Return the norm of the difference from what decoded weights give in float32, as a share of that."""
        rows = self.hidden[: len(output)]
        weights, ids = route(self.logits[: len(output)], self.top_k, normalize=True)
        expected = torch.zeros_like(output, dtype=torch.float32)
        for expert in torch.unique(ids).tolist():
            token, choice = (ids == expert).nonzero(as_tuple=True)
            gate, up = (rows[token].float() @ self._up.roll(-expert, 0).float().t()).chunk(2, dim=1)
            inner = (torch.nn.functional.silu(gate) * up).bfloat16().float()
            own = inner @ self._down.roll(-expert, 0).float().t()
            expected.index_add_(0, token, own * weights[token, choice, None])
        return float((output.float() - expected).norm() / expected.norm())

    def work(self, num_tokens: int) -> Work:
        ids = route(self.logits[:num_tokens], self.top_k, normalize=True)[1]
        flop = 2 * ids.numel() * (self._up.numel() + self._down.numel())
        return Work(num_bytes=len(torch.unique(ids)) * self.num_bytes, flop=flop)


def run(part: PartRun) -> None:
    """Record a fault where an output is wrong, and the times of each format."""
    if not part.on_gpu:
        part.record("summary", ["no Triton kernels multiply on this device"])
        return
    shape = part.sizes.models[MODEL]
    lines = [f"tokens: {', '.join(map(str, TIMED))}"]
    for name, form in FORMATS.items():
        layer = Layer(shape, form, max(TIMED), part.device)
        for num_tokens in CHECKED:
            error = layer.error(layer.compute(num_tokens))
            if not error < TOLERANCE:
                part.fault(f"{name}, {num_tokens} tokens: the error is {error:.3g} of the outputs")
        times = []
        for num_tokens in TIMED:
            seconds = _seconds(part, layer, num_tokens)
            figures = layer.work(num_tokens).figures(seconds, part.limits)
            part.record(f"{num_tokens} tokens, {name}", figures)
            times.append(f"{1e3 * figures['milliseconds']:.0f} ({1e3 * figures['floor_milliseconds']:.0f})")
        lines.append(f"  {name}: {', '.join(times)} us (floor)")
        part.record("summary", lines)


def _seconds(part: PartRun, layer: Layer, num_tokens: int) -> float:
    with torch.inference_mode():
        layer.compute(num_tokens)  # compiles
        return median_seconds(captured(lambda: layer.compute(num_tokens), part.device), part.device)
