"""Measures the rates of packed linears and of plain reading on this machine.

The linears are torch's own in bf16 (oneDNN, weights reordered for the number of rows) and, where they can be compiled,
those of kernels/cpu, in a model's shapes, with more distinct weights than fit into any cache. The best of several
passes counts, because a limit is what can be reached.

What is timed is a call from bf16 rows to a new tensor, bf16 for torch and float32 for kernels/cpu, whose call also
packs the rows. Freed memory stays mapped meanwhile, so that neither waits for new pages: an engine keeps the memory of
its outputs.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from benchmarks.limits.model_shape import WEIGHT_BYTES, ModelShape
from benchmarks.limits.rates import Rates

if TYPE_CHECKING:
    from kernels.cpu.linear import WeightKind

__all__ = ["ROWS", "TORCH", "linears", "measure_rates", "measure_read_gb_s"]

Run = Callable[[torch.Tensor], object]  # multiplies bf16 [rows, inputs] with a weight
Pack = Callable[[torch.Tensor, int], Run]  # from a bf16 weight [outputs, inputs] and the number of rows

TORCH = "torch bf16"

ROWS = (1, 4, 8, 16, 64, 128, 256, 512)
MIN_WEIGHTS = 1 << 30  # bytes of distinct weights that one pass reads
MAX_LAYERS = 128  # for a tiny model, which fits into a cache: its rates are meaningless, but quick to measure
READ_BYTES = 1 << 30

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3), and glibc's defaults
_MALLOC_DEFAULTS = {_TRIM_THRESHOLD: 128 * 1024, _MMAP_MAX: 65536}


def measure_rates(
    shape: ModelShape, pack: Pack, weight_bytes: int, rows: tuple[int, ...] = ROWS, min_weights: int = MIN_WEIGHTS
) -> Rates:
    """Measure linears of the model's shapes: the LM head once, and as many layers as ``min_weights`` requires.

    Args:
        pack: packs a weight into a linear.
        weight_bytes: bytes of each packed weight.
    """
    head = (shape.vocab_size, shape.hidden_size)
    layer_bytes = WEIGHT_BYTES * sum(outputs * inputs for outputs, inputs in shape.layer_linears)
    layers = math.ceil((min_weights - WEIGHT_BYTES * math.prod(head)) / layer_bytes)
    sizes = [head, *(shape.layer_linears * min(MAX_LAYERS, max(1, layers)))]
    parameters = sum(outputs * inputs for outputs, inputs in sizes)
    seconds = {count: _pass_seconds(sizes, count, pack) for count in rows}
    return Rates(
        parameters * weight_bytes / seconds[1] / 1e9,
        {count: 2 * parameters * count / multiply / 1e9 for count, multiply in seconds.items()},
    )


def linears() -> dict[str, tuple[Pack, int]]:
    """Return the kinds of linears on this machine by name: how to pack a weight, and the bytes of one packed weight."""
    methods: dict[str, tuple[Pack, int]] = {TORCH: (_torch_linear, 2)}
    from kernels.cpu.library import library, set_num_threads
    from kernels.cpu.linear import WeightKind, has_int8

    if library() is not None:
        set_num_threads(torch.get_num_threads())
        methods["pagoda bf16"] = (partial(_pagoda_linear, WeightKind.BFLOAT16), 2)
        if has_int8():
            methods["pagoda int8"] = (partial(_pagoda_linear, WeightKind.INT8), 1)
    return methods


def _torch_linear(weight: torch.Tensor, rows: int) -> Run:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _pagoda_linear(kind: WeightKind, weight: torch.Tensor, rows: int) -> Run:
    from kernels.cpu.linear import PackedLinear, linear

    packed = PackedLinear(kind, weight.shape[1], weight.shape[0])
    packed.set_weight(weight)
    return lambda x: linear(x, packed)


def _pass_seconds(sizes: list[tuple[int, int]], rows: int, pack: Pack) -> float:
    """Return the least time of one pass through packed weights of these sizes."""
    runs = []
    for outputs, inputs in sizes:  # one after the other, since they are large
        weight = torch.randn(inputs).to(torch.bfloat16).repeat(outputs, 1)
        runs.append((pack(weight, rows), inputs))
    inputs_by_size = {size: torch.randn(rows, size).to(torch.bfloat16) for _, size in sizes}

    def run() -> None:
        for multiply, size in runs:
            multiply(inputs_by_size[size])

    with _freed_memory_stays_mapped():
        return _least_seconds(run)


@contextmanager
def _freed_memory_stays_mapped() -> Iterator[None]:
    """Let malloc return no memory to the system in the block, where it is glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        for parameter, value in _MALLOC_DEFAULTS.items():
            mallopt(parameter, value)


def measure_read_gb_s(num_bytes: int = READ_BYTES) -> float:
    """Return the bytes a second that summing a large buffer reads."""
    buffer = torch.ones(num_bytes // 4)
    return buffer.nbytes / _least_seconds(buffer.sum) / 1e9


@torch.inference_mode()
def _least_seconds(run: Callable[[], object], repeats: int = 7) -> float:
    run()
    times = []
    for _ in range(repeats):
        started = perf_counter()
        run()
        times.append(perf_counter() - started)
    return min(times)
