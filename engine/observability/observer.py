"""EngineObserver: the interface that metrics, load reports, KV events and logs implement to receive engine events.

Knows when each event happens. Does not know what an observer does with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import OverloadedError, RequestError
from engine.scheduling.scheduler_output import SchedulerOutput, StepTimes
from engine.sequence import Sequence, SequenceGroup

__all__ = ["EngineObserver", "EngineObservers"]


class EngineObserver:
    """Receives the events of one engine. Each method does nothing unless it is overridden.

    The step thread calls all of them, ``request_rejected`` excepted. They run within the step: an observer must be
    quick, and what it raises ends the step.
    """

    def request_rejected(self, error: RequestError) -> None:
        """A request was rejected before it entered the queue. Any thread may call this."""

    def request_added(self, group: SequenceGroup, arrived: float) -> None:
        """A request is about to enter the queue. It has arrived at a time of the monotonic clock."""

    def step_started(self) -> None:
        """A step begins; the scheduler runs next."""

    def step_scheduled(self, output: SchedulerOutput) -> None:
        """The scheduler has chosen a batch. An empty one is not computed, and no ``step_finished`` follows."""

    def step_finished(self, output: SchedulerOutput, updated: Iterable[Sequence], times: StepTimes) -> None:
        """A batch was computed and its tokens were sampled.

        Args:
            output: the batch.
            updated: the sequences that sampled a token, or ended without one. ``request_left`` follows for the requests
                that ended in this step.
            times: seconds of each phase.
        """

    def sequence_ended(self, sequence: Sequence) -> None:
        """One answer of a request was ended between two steps, because of a stop string for example."""

    def request_left(self, group: SequenceGroup, rejection: OverloadedError | None) -> None:
        """A request has left the engine: it has finished, was aborted, or was rejected to make room in the queue.

        Args:
            group: the request. All its sequences have finished.
            rejection: the error that its caller gets, if it was rejected to make room.
        """

    def state_changed(self) -> None:
        """Requests or blocks have changed between two steps: an abort, or a reset of the prefix cache."""


class EngineObservers(EngineObserver):
    """Passes each event to several observers, in their order."""

    def __init__(self, observers: Iterable[EngineObserver]) -> None:
        self.members = list(observers)

    def request_rejected(self, error: RequestError) -> None:
        for observer in self.members:
            observer.request_rejected(error)

    def request_added(self, group: SequenceGroup, arrived: float) -> None:
        for observer in self.members:
            observer.request_added(group, arrived)

    def step_started(self) -> None:
        for observer in self.members:
            observer.step_started()

    def step_scheduled(self, output: SchedulerOutput) -> None:
        for observer in self.members:
            observer.step_scheduled(output)

    def step_finished(self, output: SchedulerOutput, updated: Iterable[Sequence], times: StepTimes) -> None:
        for observer in self.members:
            observer.step_finished(output, updated, times)

    def sequence_ended(self, sequence: Sequence) -> None:
        for observer in self.members:
            observer.sequence_ended(sequence)

    def request_left(self, group: SequenceGroup, rejection: OverloadedError | None) -> None:
        for observer in self.members:
            observer.request_left(group, rejection)

    def state_changed(self) -> None:
        for observer in self.members:
            observer.state_changed()
