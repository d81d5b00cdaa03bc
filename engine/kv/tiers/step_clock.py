"""StepClock: counts the steps of an engine, and calls back when the copies of those so far are made.

A GPU makes copies when it comes to them, long after the step was launched. Another thread must neither read a host page
that such a copy writes to, nor write to one that such a copy reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

__all__ = ["StepClock"]


class StepClock:
    """The steps of one engine. The engine's thread calls it."""

    def __init__(self) -> None:
        self._num_launched = self._num_finished = 0
        self._in_flight: deque[tuple[int, object]] = deque()  # steps that are launched, and their numbers
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def call_after(self, call: Callable[[], None], *, next_step: bool = False) -> None:
        """Call when all steps that were launched so far are finished; at once if they are.

        Args:
            call: the call.
            next_step: wait for the step that is launched next, too.
        """
        self._waiting.append((self._num_launched + next_step, call))
        self._run()

    def launched(self, step: object) -> None:
        """Count a step that was given to the device."""
        self._num_launched += 1
        self._in_flight.append((self._num_launched, step))

    def finished(self, step: object) -> None:
        """Record that a step is computed."""
        launched: object = None
        while launched is not step and self._in_flight:
            self._num_finished, launched = self._in_flight.popleft()
        if self._waiting:
            self._run()

    def failed(self) -> None:
        """Record that a step has failed: no step in flight will be finished."""
        self._in_flight.clear()
        self._num_finished = self._num_launched

    def reset(self) -> None:
        """Make all calls now: what they wait for may never come, and they see that the prefix cache was reset."""
        waiting, self._waiting = self._waiting, deque()
        for _, call in waiting:
            call()

    def _run(self) -> None:
        ready = [call for number, call in self._waiting if number <= self._num_finished]
        self._waiting = deque(item for item in self._waiting if item[0] > self._num_finished)
        for call in ready:
            call()
