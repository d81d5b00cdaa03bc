"""Times of the Triton kernels with other tiles, warps, stages and splits than those they have.

Each case is timed with the constants as they are, and with some of them changed; what would be faster is said first.
Attention rotates among more keys and values than a cache holds; all calls are replayed from CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch.nn import functional
from triton.runtime.errors import OutOfResources

from benchmarks.gpu.inputs.paged_batch import HeadShape, Lengths, make_inputs
from benchmarks.gpu.parts.kernels.experts import Layer
from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.timing.graphs import captured
from benchmarks.machine import median_seconds
from kernels.attention.triton import backend as attention
from kernels.attention.triton import layer_shape
from kernels.attention.triton.backend import TritonBackend
from kernels.attention.triton.layer_shape import LayerShape
from kernels.experts.triton import experts
from kernels.linear import triton as linear

__all__ = ["AS_THEY_ARE", "TOKENS", "Constants", "Times", "attention_of", "experts_of", "linears_of"]

ROTATED_BYTES = 2**29  # several times the 60 MB of an H200's second-level cache
MAX_ROTATED = 24
QUERY_HEADS, KV_HEADS, HEAD_DIM = (16, 32), 8, 128  # of Qwen3 0.6B and 8B
AS_THEY_ARE = "as they are"
PREFILLS: dict[str, Lengths] = {
    "1 x 8192": [(8192, 8192)],
    "8 x 1024": [(1024, 1024)] * 8,
    "2048 after 30720": [(2048, 32768)],
}
DECODES: dict[str, Lengths] = {
    "1 x 1024": [(1, 1024)],
    "1 x 32768": [(1, 32768)],
    "16 x 1024": [(1, 1024)] * 16,
    "16 x 8192": [(1, 8192)] * 16,
    "64 x 1024": [(1, 1024)] * 64,
    "256 x 1024": [(1, 1024)] * 256,
}


@dataclass(frozen=True)
class Constants:
    """Constants of the kernels, as they are to be.

    Attributes:
        modules: values by module and name.
        shape: values of LayerShape's properties.
    """

    modules: dict[tuple[Any, str], Any] = field(default_factory=dict)
    shape: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def set(self) -> Iterator[None]:
        """Give the modules these values, inside."""
        with ExitStack() as stack:
            # Shapes keep what followed from them.
            stack.callback(attention.shape_of.cache_clear)
            attention.shape_of.cache_clear()
            for (module, name), value in self.modules.items():
                stack.enter_context(patch.object(module, name, value))
            for name, value in self.shape.items():
                stack.enter_context(patch.object(LayerShape, name, value))
            yield


def _prefill(rows: int, warps: int, stages: int, tile: int = 64) -> Constants:
    return Constants(
        shape={"prefill_rows": rows, "prefill_warps": warps, "prefill_stages": stages, "keys_per_tile": tile}
    )


def _decode(
    tile: int = 32, stages: int = 5, programs: int = 4, keys: int = 256, splits: int = 16, warps: int = 4
) -> Constants:
    modules = {
        (attention, "_DECODE_STAGES"): stages,
        (attention, "_DECODE_WARPS"): warps,
    }
    for module in (attention, layer_shape):
        modules[module, "KEYS_PER_SPLIT"] = keys
    return Constants(modules, {"keys_per_tile": tile, "decode_programs": programs, "max_splits": splits})


def _experts(outputs: int, inputs: int, stages: int, warps: int = 4) -> Constants:
    options = {"BLOCK_OUTPUTS": outputs, "BLOCK_INPUTS": inputs, "num_warps": warps}
    return Constants({(experts, "_tile_options"): lambda rows: options, (experts, "_NUM_STAGES"): stages})


def _linear(rows: int, outputs: int, inputs: int, stages: int, warps: int = 4) -> Constants:
    sizes = {"BLOCK_ROWS": rows, "BLOCK_OUTPUTS": outputs, "BLOCK_INPUTS": inputs}
    tile = sizes | {"num_stages": stages, "num_warps": warps}
    return Constants({(linear, "_tile"): lambda rows: tile})


PREFILL_CONSTANTS = {
    AS_THEY_ARE: Constants(),
    "128 rows, 8 warps, 2 stages": _prefill(128, 8, 2),
    "128 rows, 8 warps, 3 stages": _prefill(128, 8, 3),
    "128 rows, 8 warps, 5 stages": _prefill(128, 8, 5),
    "128 rows, 4 warps, 2 stages": _prefill(128, 4, 2),
    "128 rows, 8 warps, 2 stages, 128 keys": _prefill(128, 8, 2, 128),
    "128 rows, 8 warps, 5 stages, 32 keys": _prefill(128, 8, 5, 32),
    "64 rows, 4 warps, 2 stages": _prefill(64, 4, 2),
    "64 rows, 4 warps, 3 stages": _prefill(64, 4, 3),
    "64 rows, 4 warps, 5 stages": _prefill(64, 4, 5),
    "64 rows, 4 warps, 2 stages, 128 keys": _prefill(64, 4, 2, 128),
}
DECODE_CONSTANTS = {
    AS_THEY_ARE: Constants(),
    "64 keys, 2 programs": _decode(tile=64, programs=2),
    "64 keys, 3 programs": _decode(tile=64, programs=3),
    "2 programs": _decode(programs=2),
    "3 programs": _decode(programs=3),
    "6 programs": _decode(programs=6),
    "3 stages": _decode(stages=3),
    "4 stages": _decode(stages=4),
    "7 stages": _decode(stages=7),
    "128 keys a split": _decode(keys=128),
    "512 keys a split": _decode(keys=512),
    "32 splits": _decode(splits=32),
    "64 splits": _decode(splits=64),
    "128 keys, 2 programs, 3 stages": _decode(tile=128, programs=2, stages=3),
    "2 warps": _decode(warps=2),
    "8 warps": _decode(warps=8),
}
DECODE_FP8_CONSTANTS = {
    AS_THEY_ARE: Constants(),
    "64 keys, 2 programs": _decode(tile=64, programs=2),
    "64 keys, 3 programs": _decode(tile=64, programs=3),
    "64 keys, 6 programs": _decode(tile=64, programs=6),
    "64 keys, 3 stages": _decode(tile=64, stages=3),
    "64 keys, 4 stages": _decode(tile=64, stages=4),
    "64 keys, 7 stages": _decode(tile=64, stages=7, programs=3),
    "64 keys, 2 warps": _decode(tile=64, warps=2),
    "64 keys, 8 warps": _decode(tile=64, warps=8),
    "32 keys": _decode(tile=32),
    "32 keys, 7 stages": _decode(tile=32, stages=7),
    "32 keys, 6 programs": _decode(tile=32, programs=6),
    "32 keys, 2 warps, 6 programs": _decode(tile=32, warps=2, programs=6),
    "128 keys, 2 programs": _decode(tile=128, programs=2),
    "128 keys, 3 programs, 3 stages": _decode(tile=128, programs=3, stages=3),
}
EXPERT_CONSTANTS = {
    AS_THEY_ARE: Constants(),
    "64 x 64, 3 stages": _experts(64, 64, 3),
    "64 x 64, 5 stages": _experts(64, 64, 5),
    "128 x 64, 3 stages": _experts(128, 64, 3),
    "128 x 64, 4 stages": _experts(128, 64, 4),
    "128 x 64, 4 stages, 8 warps": _experts(128, 64, 4, 8),
    "64 x 128, 3 stages": _experts(64, 128, 3),
    "64 x 128, 4 stages": _experts(64, 128, 4),
    "32 x 128, 4 stages": _experts(32, 128, 4),
    "128 x 128, 3 stages, 8 warps": _experts(128, 128, 3, 8),
}
LINEAR_CONSTANTS = {
    AS_THEY_ARE: Constants(),
    "64 x 64 x 128, 4 stages": _linear(64, 64, 128, 4),
    "64 x 128 x 64, 4 stages": _linear(64, 128, 64, 4),
    "128 x 128 x 64, 4 stages": _linear(128, 128, 64, 4, 8),
    "128 x 64 x 64, 4 stages": _linear(128, 64, 64, 4),
    "64 x 32 x 128, 5 stages": _linear(64, 32, 128, 5),
    "64 x 64 x 64, 6 stages": _linear(64, 64, 64, 6),
    "16 x 16 x 256, 4 stages": _linear(16, 16, 256, 4),
    "16 x 32 x 128, 5 stages": _linear(16, 32, 128, 5),
    "16 x 32 x 256, 3 stages": _linear(16, 32, 256, 3),
    "16 x 32 x 256, 4 stages": _linear(16, 32, 256, 4),
    "16 x 64 x 128, 4 stages": _linear(16, 64, 128, 4),
    "16 x 64 x 256, 3 stages": _linear(16, 64, 256, 3),
    "16 x 16 x 512, 3 stages": _linear(16, 16, 512, 3),
    "cuBLAS": Constants({(linear, "linear_triton"): functional.linear}),
}
TOKENS = (1, 16, 64, 256, 2048)


def attention_of(part: PartRun, kind: Literal["prefill", "decode"], *, is_fp8: bool = False) -> None:
    """Record the time of each batch with each choice of constants, in microseconds; with keys in FP8 if asked."""
    cases, constants = (PREFILLS, PREFILL_CONSTANTS) if kind == "prefill" else (DECODES, DECODE_CONSTANTS)
    if is_fp8 and kind == "decode":
        constants = DECODE_FP8_CONSTANTS
    times = Times(part, constants)
    for heads in QUERY_HEADS:
        shape = HeadShape(heads, KV_HEADS, HEAD_DIM, TritonBackend.default_block_size, is_fp8=is_fp8)
        for name, lengths in cases.items():
            times.measure(f"{heads}/{KV_HEADS} heads, {name}", _attention(part, shape, lengths))


def experts_of(part: PartRun, model: str) -> None:
    """Record the time of one layer's experts likewise."""
    times = Times(part, EXPERT_CONSTANTS)
    layer = Layer(part.sizes.models[model], max(TOKENS), torch.bfloat16, part.device)
    for tokens in TOKENS:
        times.measure(f"{tokens} tokens", partial(layer.compute, tokens))


def linears_of(part: PartRun, models: list[str]) -> None:
    """Record the time of a feed-forward layer's linears with ``batch_invariant`` likewise."""
    times = Times(part, LINEAR_CONSTANTS)
    for name in models:
        for num_rows in TOKENS:
            times.measure(f"{name}, {num_rows} rows", _linears(part, part.sizes.models[name], num_rows))


def _attention(part: PartRun, shape: HeadShape, lengths: Lengths) -> Callable[[], object]:
    kv_bytes = sum(seq_len for _, seq_len in lengths) * shape.kv_bytes_per_token
    copies = 1 if lengths[0][0] > 1 else min(MAX_ROTATED, -(-ROTATED_BYTES // kv_bytes))
    batches = [make_inputs(lengths, shape, part.device, seed=seed) for seed in range(copies)]

    def compute() -> None:
        backend = TritonBackend()  # its plans follow from the constants
        for batch in batches:
            backend.forward(batch)

    return compute


def _linears(part: PartRun, model: Any, num_rows: int) -> Callable[[], object]:
    hidden, inner = model.hidden_size, model.intermediate_size
    copies = max(2, min(16, ROTATED_BYTES // (6 * hidden * inner)))
    ups = [torch.randn(2 * inner, hidden, device=part.device, dtype=torch.bfloat16) for _ in range(copies)]
    downs = [torch.randn(hidden, inner, device=part.device, dtype=torch.bfloat16) for _ in range(copies)]
    rows = torch.randn(num_rows, hidden, device=part.device, dtype=torch.bfloat16)
    inner_rows = torch.randn(num_rows, inner, device=part.device, dtype=torch.bfloat16)

    def compute() -> None:
        for up, down in zip(ups, downs, strict=True):
            linear.linear_triton(rows, up, None)
            linear.linear_triton(inner_rows, down, None)

    return compute


class Times:
    """Times of cases, each with the constants as they are and with each choice of others."""

    def __init__(self, part: PartRun, constants: dict[str, Constants]) -> None:
        self._part, self.constants = part, constants if part.on_gpu else {}
        self._lines: list[str] = []

    def measure(self, case: str, compute: Callable[[], object]) -> None:
        """Record the times of ``compute``, in microseconds."""
        device = self._part.device
        times: dict[str, float] = {}
        for name, chosen in self.constants.items():
            with chosen.set():
                try:
                    compute()  # compiles
                    times[name] = 1e6 * median_seconds(captured(compute, device), device, warmup=2, repeats=7)
                except OutOfResources as error:
                    self._part.record(f"{case}, {name}", str(error))
        self._part.record(case, times)
        best = ", ".join(f"{name}: {times[name]:.0f}" for name in sorted(times, key=times.__getitem__)[:4])
        self._lines.append(f"{case}: {times.get(AS_THEY_ARE, 0.0):.0f} us; {best}")
        self._part.record("summary", self._lines)
