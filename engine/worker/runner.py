"""Runner: the interface between the engine and what computes its batches."""

from __future__ import annotations

from typing import Protocol

from engine.config import EngineInfo
from engine.kv.tiers.host_memory import HostMemory
from engine.scheduling.drafting.draft_model import DraftModel
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput, StepTimes

__all__ = ["ComputedStep", "Runner", "StepInFlight"]


class StepInFlight(Protocol):
    """A batch that was handed to the device, and whose tokens are not known yet."""

    def finish(self, times: StepTimes) -> SampledTokens:
        """Wait until the batch is computed; return the tokens of its ``sampling``. The times go to ``times``."""


class ComputedStep:
    """A step that a runner without a device has computed at once."""

    def __init__(self, sampled: SampledTokens) -> None:
        self._sampled = sampled

    def finish(self, times: StepTimes) -> SampledTokens:
        """Return what was sampled."""
        return self._sampled


class Runner(Protocol):
    """Computes the batches: the ModelRunner, or a fake in tests."""

    @property
    def info(self) -> EngineInfo:
        """The model and the sizes that the engine schedules for."""

    @property
    def host_memory(self) -> HostMemory | None:
        """The bytes of the host pools' pages; None if this process does not have whole pages."""

    @property
    def draft_model(self) -> DraftModel | None:
        """The draft model; None if the config has none."""

    def start(self, output: SchedulerOutput) -> StepInFlight:
        """Start to compute a batch, after all that were started before it; do not wait for any of them.

        Where a sequence has a pending token, the batch computes the token that the previous batch samples for it.
        """

    def run(self, output: SchedulerOutput, times: StepTimes) -> SampledTokens:
        """Compute a batch and return the tokens of ``output.sampling``."""

    def check_health(self) -> None:
        """Raise EngineDeadError if no further batch can be computed. Any thread may call it."""

    def close(self) -> None:
        """Release what the runner holds other than memory, such as processes."""
