"""Where the time of a decode step goes: on the GPU by kernels, on the host, and how long the GPU waits.

The profiler slows the host, so a step's time is measured without it, and the GPU's idle share is what remains of that
time beside the kernels.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.engines import decoding, loaded, timed_steps
from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.timing.kernel_groups import busy_us, table
from benchmarks.gpu.timing.profile import profile_steps
from engine.engine import Engine

__all__ = ["run"]

TIMED = 16
PROFILED = 6
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}


def run(part: PartRun, model: str) -> None:
    """Record the table for each batch, greedy and sampled."""
    lines: list[str] = []
    with loaded(part, model, max_num_seqs=max(batch for batch, _ in part.sizes.profiled)) as llm:
        for batch, context in part.sizes.profiled:
            for name, temperature in TEMPERATURES.items():
                steps = TIMED + PROFILED + 4
                with decoding(llm, batch, context, steps=steps, temperature=temperature, seed=batch) as engine:
                    figures = _measure(part, engine)
                part.record(f"{name}, {batch} x {context}", figures)
                lines += _lines(f"{name}, {batch} x {context}", figures)
                part.record("summary", lines)


def _measure(part: PartRun, engine: Engine) -> dict[str, Any]:
    seconds, recorder = timed_steps(part, engine, TIMED)
    profiled = profile_steps(engine, PROFILED)
    busy = busy_us(profiled.kernels) / PROFILED / 1e3
    return {
        "step_milliseconds": 1e3 * seconds,
        "engine_milliseconds": recorder.medians(),
        "gpu_milliseconds": busy,
        "gpu_idle_share": max(0.0, 1 - busy / (1e3 * seconds)),
        "host_calls": {name: count / PROFILED for name, count in profiled.host_calls.items()},
        "gpu": table(profiled.kernels, PROFILED),
    }


def _lines(name: str, figures: dict[str, Any]) -> list[str]:
    groups = figures["gpu"]["groups"]
    launches = sum(item["launches"] for item in groups.values())
    shares = ", ".join(f"{group} {figures['milliseconds']:.2f}" for group, figures in groups.items())
    phases = ", ".join(f"{phase} {time:.2f}" for phase, time in figures["engine_milliseconds"].items())
    return [
        f"{name}: {figures['step_milliseconds']:.2f} ms, GPU idle {figures['gpu_idle_share']:.0%}, "
        f"{launches:.0f} launches; engine: {phases}",
        f"  GPU ms: {shares}",
    ]
