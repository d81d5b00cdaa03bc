"""Linear layers of ``batch_invariant`` beside cuBLAS, and whether a row has the same bits in any batch.

The weights rotate among more than a cache holds, and calls are replayed from a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.timing.floors import Work
from benchmarks.gpu.timing.graphs import captured
from benchmarks.machine import median_seconds
from kernels.linear.triton import linear_triton

__all__ = ["run"]

NUM_ROWS = (1, 16, 64, 256, 2048)
ROTATED_BYTES = 2**29  # several times the 60 MB of an H200's second-level cache
Linear = Callable[[torch.Tensor, torch.Tensor, None], torch.Tensor]


def run(part: PartRun) -> None:
    """Record the time of both for the products of a layer, and a fault where a row's bits depend on the batch."""
    if not part.on_gpu:
        part.record("summary", ["no Triton kernels multiply on this device"])
        return
    for name, shape in part.sizes.models.items():
        hidden, inner = shape.hidden_size, shape.intermediate_size
        for num_outputs, num_inputs in ((2 * inner, hidden), (hidden, inner)):
            copies = max(2, ROTATED_BYTES // (2 * num_outputs * num_inputs))
            weights = [_random(part, num_outputs, num_inputs) for _ in range(min(copies, 32))]
            rows = _random(part, max(NUM_ROWS), num_inputs)
            _check_bits(part, rows, weights[0])
            for num_rows in NUM_ROWS:
                title = f"{name}, {num_rows} x {num_inputs} -> {num_outputs}"
                part.record(title, _measure(part, rows[:num_rows], weights))


def _random(part: PartRun, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=part.device, dtype=torch.bfloat16)


def _check_bits(part: PartRun, rows: torch.Tensor, weight: torch.Tensor) -> None:
    together = linear_triton(rows, weight, None)
    for num_rows in NUM_ROWS:
        if not torch.equal(linear_triton(rows[:num_rows], weight, None), together[:num_rows]):
            part.fault(f"{tuple(weight.shape)}: rows have other bits among {num_rows} than among {len(rows)}")
    error = (together.double() - F.linear(rows.double(), weight.double())).abs().max() / together.double().abs().max()
    if not error < 0.01:
        part.fault(f"{tuple(weight.shape)}: the largest error is {float(error):.3g} of the largest output")


def _measure(part: PartRun, rows: torch.Tensor, weights: list[torch.Tensor]) -> dict[str, float]:
    work = Work(num_bytes=weights[0].nbytes, flop=2 * len(rows) * weights[0].numel())
    fixed, cublas = (_seconds(part, linear, rows, weights) for linear in (linear_triton, F.linear))
    return work.figures(fixed, part.limits) | {"cublas_milliseconds": 1e3 * cublas, "share_of_cublas": cublas / fixed}


def _seconds(part: PartRun, linear: Linear, rows: torch.Tensor, weights: list[torch.Tensor]) -> float:
    def run_all() -> None:
        for weight in weights:
            linear(rows, weight, None)

    run_all()  # compiles
    return median_seconds(captured(run_all, part.device), part.device) / len(weights)
