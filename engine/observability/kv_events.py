"""KVEventReporter: reports the changes of the prefix cache and its snapshots, one numbered batch after each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from engine.kv.block_manager import BlockManager
from engine.kv.events import KVEventBatch
from engine.observability.observer import EngineObserver
from engine.scheduling.scheduler_output import SchedulerOutput, StepTimes
from engine.sequence import Sequence

__all__ = ["KVEventReporter"]


class KVEventReporter(EngineObserver):
    """Passes the events of the prefix cache to a callback.

    Args:
        block_manager: its prefix cache records the events.
        callback: called from the step thread with every batch that is not empty.
    """

    def __init__(self, block_manager: BlockManager, callback: Callable[[KVEventBatch], None]) -> None:
        self._block_manager = block_manager
        self._callback = callback
        self._run_id = time.time_ns()
        self._num_batches = 0

    def step_finished(self, output: SchedulerOutput, updated: Iterable[Sequence], times: StepTimes) -> None:
        self._report()

    def state_changed(self) -> None:
        self._report()

    def _report(self) -> None:
        events, states = self._block_manager.prefix_cache.events.take(), self._block_manager.states
        if states is not None:
            events += states.snapshots.events.take()
        if events:
            self._callback(KVEventBatch(self._run_id, self._num_batches, events))
            self._num_batches += 1
