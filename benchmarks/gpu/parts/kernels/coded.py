"""Linear layers on codes of a few bits: against decoded weights in float64, and their times beside cuBLAS on bfloat16.

The weights rotate among more than a cache holds, and calls are replayed from a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.gpu.inputs.coded_layers import FORMATS, coded_linear, random_matrix, rotated
from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.timing.floors import Work
from benchmarks.gpu.timing.graphs import captured
from benchmarks.machine import median_seconds
from kernels.coded_weight import CodedMatrix, decode

__all__ = ["run"]

NUM_ROWS = (1, 16, 64, 128, 256, 512, 2048)
CHECKED = (1, 16, 17, 64, 65, 300)  # rows; the last ones are multiplied by cuBLAS, if a row's bits may differ
TOLERANCE = 8e-3  # of the norm of what float64 computes with the decoded weights: sums are rounded to bfloat16
CHECKED_SHAPES = ((4096, 4096), (1000, 1024))  # outputs and inputs


def run(part: PartRun) -> None:
    """Record a fault where an output is wrong, and the times for a large model's feed-forward layer."""
    if not part.on_gpu:
        part.record("summary", ["no Triton kernels multiply on this device"])
        return
    shape = part.sizes.models["8b"]
    lines: list[str] = []
    for name, form in FORMATS.items():
        for num_outputs, num_inputs in CHECKED_SHAPES:
            _check(part, name, random_matrix(form, num_outputs, num_inputs, part.device))
    for num_outputs, num_inputs in (
        (2 * shape.intermediate_size, shape.hidden_size),
        (shape.hidden_size, shape.intermediate_size),
    ):
        rows = torch.randn(max(NUM_ROWS), num_inputs, device=part.device, dtype=torch.bfloat16)
        plain = [_plain(num_outputs, num_inputs, part.device) for _ in range(3)]
        for num_rows in NUM_ROWS:
            cublas = _seconds(part, rows[:num_rows], plain)
            lines.append(f"{num_rows:5} x {num_inputs} -> {num_outputs}: bfloat16 {1e6 * cublas:.0f} us")
            part.record(lines[-1].split(":", maxsplit=1)[0] + ", bfloat16", {"milliseconds": 1e3 * cublas})
        for name, form in FORMATS.items():
            layers = rotated(random_matrix(form, num_outputs, num_inputs, part.device), part.device)
            num_bytes = sum(parameter.nbytes for parameter in layers[0].parameters())
            times = []
            for num_rows in NUM_ROWS:
                work = Work(num_bytes=num_bytes, flop=2 * num_rows * num_outputs * num_inputs)
                figures = work.figures(_seconds(part, rows[:num_rows], layers), part.limits)
                part.record(f"{num_rows:5} x {num_inputs} -> {num_outputs}, {name}", figures)
                times.append(f"{1e3 * figures['milliseconds']:.0f} ({1e3 * figures['floor_milliseconds']:.0f})")
            lines.append(f"  {name}: {', '.join(times)} us (floor)")
            part.record("summary", lines)


def _check(part: PartRun, name: str, matrix: CodedMatrix) -> None:
    num_outputs, num_inputs = matrix.shape
    weight = decode(_on_cpu(matrix)).to(part.device, torch.bfloat16).double()
    rows = torch.randn(max(CHECKED), num_inputs, device=part.device, dtype=torch.bfloat16)
    expected = F.linear(rows.double(), weight)
    for batch_invariant in (False, True):
        layer = coded_linear(matrix, part.device, batch_invariant=batch_invariant)
        together = layer(rows)
        for num_rows in CHECKED:
            output = layer(rows[:num_rows])
            error = float((output.double() - expected[:num_rows]).norm() / expected[:num_rows].norm())
            title = f"{name}, {num_rows} x {num_inputs} -> {num_outputs}, invariant: {batch_invariant}"
            if not error < TOLERANCE:
                part.fault(f"{title}: the error is {error:.3g} of the outputs")
            if batch_invariant and not torch.equal(output, together[:num_rows]):
                part.fault(f"{title}: a row has other bits than among {max(CHECKED)}")


def _on_cpu(matrix: CodedMatrix) -> CodedMatrix:
    return matrix.with_parts({name: part.cpu() for name, part in matrix.parts.items()})


def _plain(num_outputs: int, num_inputs: int, device: torch.device) -> nn.Module:
    return nn.Linear(num_inputs, num_outputs, bias=False, device=device, dtype=torch.bfloat16)


def _seconds(part: PartRun, rows: torch.Tensor, layers: Sequence[nn.Module]) -> float:
    """Return the seconds of one layer."""

    def run_all() -> None:
        for layer in layers:
            layer(rows)

    with torch.inference_mode():
        run_all()  # compiles
        return median_seconds(captured(run_all, part.device), part.device, warmup=2, repeats=7) / len(layers)
