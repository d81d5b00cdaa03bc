"""What hears the KV transport in tests: a listener that remembers, what is published, and deadlines instead of naps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from threading import Condition

from engine.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from engine.observability.load import EngineLoad

DEADLINE_S = 20.0


class Known:
    """A dict of sets that hears of blocks, and everything else it was told, in order."""

    def __init__(self) -> None:
        self.blocks: defaultdict[str, set[int]] = defaultdict(set)
        self.calls: list[tuple[str, str]] = []  # what, of which replica
        self.awaiting: defaultdict[str, list[list[int]]] = defaultdict(list)  # prompts that joined the queue
        self.reports: defaultdict[str, list[tuple[EngineLoad, float]]] = defaultdict(list)
        self._changed = Condition()

    def stored(self, replica: str, hashes: Iterable[int]) -> None:
        self.blocks[replica].update(hashes)
        self._note("stored", replica)

    def removed(self, replica: str, hashes: Iterable[int]) -> None:
        self.blocks[replica].difference_update(hashes)
        self._note("removed", replica)

    def cleared(self, replica: str) -> None:
        self.blocks[replica].clear()
        self._note("cleared", replica)

    def replaced(self, replica: str, hashes: Iterable[int]) -> None:
        self.blocks[replica] = set(hashes)
        self._note("replaced", replica)

    def awaited(self, replica: str, hashes: Sequence[int], *, now: float) -> None:
        self.awaiting[replica].append(list(hashes))
        self._note("awaited", replica)

    def report(self, replica: str, load: EngineLoad, *, now: float) -> None:
        self.reports[replica].append((load, now))
        self._note("report", replica)

    def lost(self, replica: str) -> None:
        self._note("lost", replica)

    def count(self, what: str, replica: str) -> int:
        """Return how often it was told this."""
        return self.calls.count((what, replica))

    def wait(self, is_reached: Callable[[], bool], *, for_what: str = "it") -> None:
        """Wait until something holds, looked at whenever it is told something."""
        with self._changed:
            assert self._changed.wait_for(is_reached, DEADLINE_S), f"{for_what} did not come: {self.calls[-20:]}"

    def wait_count(self, what: str, replica: str, times: int = 1) -> None:
        """Wait until it was told this so many times."""
        self.wait(lambda: self.count(what, replica) >= times, for_what=f"{what} of {replica}")

    def _note(self, what: str, replica: str) -> None:
        with self._changed:
            self.calls.append((what, replica))
            self._changed.notify_all()


def eventually(is_reached: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Wait until something holds that nobody tells of."""
    deadline = time.monotonic() + deadline_s
    while not is_reached():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def stored(*hashes: int) -> tuple[KVEvent, ...]:
    return tuple(BlockStored(one, 0, (1, 2, 3, 4)) for one in hashes)


def removed(*hashes: int) -> tuple[KVEvent, ...]:
    return tuple(BlockRemoved(one) for one in hashes)


CLEARED: tuple[KVEvent, ...] = (AllBlocksCleared(),)


def batch(number: int, events: tuple[KVEvent, ...], generation: int = 1) -> KVEventBatch:
    return KVEventBatch(generation, number, events)


def load(num_steps: int = 0) -> EngineLoad:
    return EngineLoad(1, 2, 300, 64, 32, 6500.0, 0.03, num_steps)
