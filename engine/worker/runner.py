"""Runner: the interface between the engine and whatever computes its batches."""

from __future__ import annotations

from typing import Protocol

from engine.config import EngineInfo
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput, StepTimes

__all__ = ["Runner"]


class Runner(Protocol):
    """Computes the batches: the ModelRunner, or a fake in tests."""

    @property
    def info(self) -> EngineInfo:
        """The model and the sizes that the engine schedules for."""

    def run(self, output: SchedulerOutput, times: StepTimes) -> SampledTokens:
        """Compute a batch and return the tokens of ``output.sampling``."""

    def check_health(self) -> None:
        """Raise EngineDeadError if no further batch can be computed. Any thread may call it."""

    def close(self) -> None:
        """Release what the runner holds besides memory, such as processes."""
