"""The machine, and the rates that nothing on it exceeds: a copy's bandwidth and a bfloat16 product's FLOP/s."""

from __future__ import annotations

from benchmarks.gpu.run.part_run import PartRun
from benchmarks.machine import describe, measure_limits

__all__ = ["run"]


def run(part: PartRun) -> None:
    """Record the machine and its limits."""
    machine = describe(part.device)
    part.record("machine", machine)
    limits = measure_limits(part.device, copy_bytes=part.sizes.copy_bytes, matmul_size=part.sizes.matmul_size)
    for name, value in limits.items():
        part.record(name, value)
    name = machine["gpu"]["name"] if part.on_gpu else machine["cpu"]
    rates = f"copy {limits['copy_gb_s']:.0f} GB/s, bf16 product {limits['bf16_tflop_s']:.3g} TFLOP/s"
    part.record("summary", [f"{name}: {rates}"])
