"""StepTimer: how long a step's forward pass and its sampling take, on the device that computes them."""

from __future__ import annotations

from time import perf_counter

import torch

from engine.scheduling.scheduler_output import StepTimes

__all__ = ["StepTimer"]


class StepTimer:
    """Clocks one step after another.

    A GPU has hardly begun when the host has queued its forward pass, so events in its queue note when the pass starts
    and ends. They are read when the step is over and the GPU done, which costs no wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = _timing_event(), _timing_event()

    def start(self) -> None:
        """Start the clock of a step. The device must have nothing left to do."""
        self._started = perf_counter()
        if self._events is not None:
            self._events[0].record(torch.cuda.current_stream(self._device))

    def forward_queued(self) -> None:
        """Note the end of the forward pass, which the device may not have reached yet."""
        self._forward_queued = perf_counter()
        if self._events is not None:
            self._events[1].record(torch.cuda.current_stream(self._device))

    def stop(self, times: StepTimes) -> None:
        """Write the step's times; the device must be done with it. What is not the forward pass is sampling."""
        seconds = perf_counter() - self._started
        if self._events is None:
            times.forward = self._forward_queued - self._started
        else:
            times.forward = self._events[0].elapsed_time(self._events[1]) / 1e3
        times.sample = max(seconds - times.forward, 0.0)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
