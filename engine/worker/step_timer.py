"""StepTimer: how long a step's forward pass and its sampling take, on the device that computes them."""

from __future__ import annotations

from time import perf_counter

import torch

from engine.scheduling.scheduler_output import StepTimes
from kernels.device_copy import timing_event

__all__ = ["StepTimer"]


class StepTimer:
    """Measures the times of one step, from its construction on.

    A GPU has hardly begun when the host has queued a step, and may still compute the one before. So events in its queue
    note when the step starts, and when its forward pass and its sampling end. They are read when the step is over,
    which costs no wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = [timing_event() for _ in range(3)] if device.type == "cuda" else None
        self._started = perf_counter()
        self._record(0)

    @property
    def end(self) -> torch.cuda.Event | None:
        """The event at the end of the step; None on a CPU, which has computed it by then."""
        return None if self._events is None else self._events[2]

    def forward_queued(self) -> None:
        """Note the end of the forward pass, which the device may not have reached yet."""
        self._forward_queued = perf_counter()
        self._record(1)

    def step_queued(self) -> None:
        """Note the end of the step, copies to the host included."""
        self._step_queued = perf_counter()
        self._record(2)

    def step_done(self) -> None:
        """Note that the host has waited for the end of the step."""
        self._step_done = perf_counter()

    def stop(self, times: StepTimes) -> None:
        """Write the step's times. What the host has done since ``step_done`` belongs to the sampling."""
        if self._events is None:
            times.forward = self._forward_queued - self._started
            times.sample = self._step_queued - self._forward_queued
        else:
            started, forward_done, done = self._events
            times.forward = started.elapsed_time(forward_done) / 1e3
            times.sample = forward_done.elapsed_time(done) / 1e3
        times.sample += perf_counter() - self._step_done

    def _record(self, index: int) -> None:
        if self._events is not None:
            self._events[index].record(torch.cuda.current_stream(self._device))
