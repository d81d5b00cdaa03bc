"""Writes a checkpoint with random weights, which later parts load; an earlier run's is kept."""

from __future__ import annotations

from time import perf_counter

from benchmarks.gpu.inputs.checkpoint import write_checkpoint
from benchmarks.gpu.inputs.weight_formats import BFLOAT16, FORMATS
from benchmarks.gpu.run.part_run import PartRun

__all__ = ["run"]


def run(part: PartRun, model: str, weights: str = "") -> None:
    """Write the model ``model`` of the sizes to a directory of that name, and of its weights' format."""
    directory = part.work / f"{model}{weights}"
    if (directory / "config.json").exists():
        part.record("summary", ["kept from an earlier run"])
        return
    started = perf_counter()
    shape = part.sizes.models[model]
    num_bytes = write_checkpoint(
        directory,
        shape,
        part.device,
        max_model_len=part.sizes.max_model_len,
        weight_format=FORMATS[weights] if weights else BFLOAT16,
    )
    part.record("bytes", num_bytes)
    part.record("seconds", perf_counter() - started)
