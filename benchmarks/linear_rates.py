"""What packed bf16 linears and plain reading do on this machine, measured.

The linears are torch's own (oneDNN, weights reordered for the number of rows), in a model's shapes, with so many
distinct weights that no cache helps. The best of several passes counts, since a limit is what can be reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter

import torch

from benchmarks.roofline import WEIGHT_BYTES, ModelShape, Rates

__all__ = ["ROWS", "measure_rates", "measure_read_gb_s"]

ROWS = (1, 4, 8, 16, 64, 256)
MIN_WEIGHTS = 1 << 30  # bytes of distinct weights that one pass reads
READ_BYTES = 1 << 30


def measure_rates(shape: ModelShape, rows: tuple[int, ...] = ROWS, min_weights: int = MIN_WEIGHTS) -> Rates:
    """Measure linears of the model's shapes: the one before the logits once, then as many layers as it takes."""
    head = (shape.vocab_size, shape.hidden_size)
    layer_bytes = WEIGHT_BYTES * sum(outputs * inputs for outputs, inputs in shape.layer_linears)
    layers = max(1, math.ceil((min_weights - WEIGHT_BYTES * math.prod(head)) / layer_bytes))
    sizes = [head, *(shape.layer_linears * layers)]
    parameters = sum(outputs * inputs for outputs, inputs in sizes)
    seconds = {count: _pass_seconds(sizes, count) for count in rows}
    return Rates(
        parameters * WEIGHT_BYTES / seconds[1] / 1e9,
        {count: 2 * parameters * count / one / 1e9 for count, one in seconds.items()},
    )


def _pass_seconds(sizes: list[tuple[int, int]], rows: int) -> float:
    """Return the least time of one pass through packed weights of these sizes."""
    linears = []
    for outputs, inputs in sizes:  # one after the other: they are large
        weight = torch.randn(outputs, inputs).mul_(0.02).to(torch.bfloat16)
        linears.append((torch.ops.mkldnn._reorder_linear_weight(weight, rows), inputs))
    inputs_by_size = {size: torch.randn(rows, size).to(torch.bfloat16) for _, size in sizes}

    def run() -> None:
        for packed, size in linears:
            torch.ops.mkldnn._linear_pointwise(inputs_by_size[size], packed, None, "none", [], "")

    return _least_seconds(run)


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
