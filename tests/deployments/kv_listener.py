"""Helpers for tests of KV events: a recording listener, events to publish, and waits with a deadline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from threading import Condition

from engine.kv.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockSaved,
    BlockStored,
    BlockUnsaved,
    KVEvent,
    KVEventBatch,
    StateRemoved,
    StateStored,
    StorageName,
)
from engine.observability.load import EngineLoad
from tests.waiting import HANG_S


class Known:
    """A Listener that keeps the blocks of each replica and every call, in order."""

    def __init__(self) -> None:
        self.blocks: defaultdict[str, set[int]] = defaultdict(set)
        self.states: dict[str, set[int]] = {}  # of the replicas whose model has states
        self.on_disk: defaultdict[str, set[int]] = defaultdict(set)
        self.on_shared: defaultdict[str, set[int]] = defaultdict(set)
        self.calls: list[tuple[str, str]] = []  # (method, replica)
        self.awaiting: defaultdict[str, list[list[int]]] = defaultdict(list)  # announced prompts
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
        self.on_disk[replica].clear()
        self.on_shared[replica].clear()
        self.states.get(replica, set()).clear()
        self._note("cleared", replica)

    def states_stored(self, replica: str, hashes: Iterable[int]) -> None:
        self.states.setdefault(replica, set()).update(hashes)
        self._note("states_stored", replica)

    def states_removed(self, replica: str, hashes: Iterable[int]) -> None:
        self.states.setdefault(replica, set()).difference_update(hashes)
        self._note("states_removed", replica)

    def saved(self, replica: str, hashes: Iterable[int], storage: StorageName = "disk") -> None:
        (self.on_disk if storage == "disk" else self.on_shared)[replica].update(hashes)
        self._note("saved", replica)

    def unsaved(self, replica: str, hashes: Iterable[int], storage: StorageName = "disk") -> None:
        (self.on_disk if storage == "disk" else self.on_shared)[replica].difference_update(hashes)
        self._note("unsaved", replica)

    def replaced(
        self,
        replica: str,
        hashes: Iterable[int],
        states: Iterable[int] | None = None,
        saved: Iterable[int] = (),
        shared: Iterable[int] = (),
    ) -> None:
        self.blocks[replica] = set(hashes)
        self.on_disk[replica], self.on_shared[replica] = set(saved), set(shared)
        self.states.pop(replica, None)
        if states is not None:
            self.states[replica] = set(states)
        self._note("replaced", replica)

    def awaited(self, replica: str, hashes: Sequence[int], *, now: float) -> None:
        self.awaiting[replica].append(list(hashes))
        self._note("awaited", replica)

    def report(self, replica: str, load: EngineLoad, *, now: float) -> None:
        self.reports[replica].append((load, now))
        self._note("report", replica)

    def events_lost(self, replica: str) -> None:
        self._note("events_lost", replica)

    def count(self, what: str, replica: str) -> int:
        """Return how often a method was called for a replica."""
        return self.calls.count((what, replica))

    def wait(self, is_reached: Callable[[], bool], *, for_what: str = "a condition") -> None:
        """Wait until ``is_reached`` holds; checked after every call."""
        with self._changed:
            assert self._changed.wait_for(is_reached, HANG_S), f"no {for_what} in time: {self.calls[-20:]}"

    def wait_count(self, what: str, replica: str, times: int = 1) -> None:
        """Wait until a method was called so often for a replica."""
        self.wait(lambda: self.count(what, replica) >= times, for_what=f"{what} of {replica}")

    def _note(self, what: str, replica: str) -> None:
        with self._changed:
            self.calls.append((what, replica))
            self._changed.notify_all()


def stored(*hashes: int) -> tuple[KVEvent, ...]:
    return tuple(BlockStored(block_hash) for block_hash in hashes)


def removed(*hashes: int) -> tuple[KVEvent, ...]:
    return tuple(BlockRemoved(block_hash) for block_hash in hashes)


def saved(*hashes: int, storage: StorageName = "disk") -> tuple[KVEvent, ...]:
    return tuple(BlockSaved(block_hash, storage) for block_hash in hashes)


def unsaved(*hashes: int, storage: StorageName = "disk") -> tuple[KVEvent, ...]:
    return tuple(BlockUnsaved(block_hash, storage) for block_hash in hashes)


def states_stored(*hashes: int) -> tuple[KVEvent, ...]:
    return tuple(StateStored(block_hash) for block_hash in hashes)


def states_removed(*hashes: int) -> tuple[KVEvent, ...]:
    return tuple(StateRemoved(block_hash) for block_hash in hashes)


CLEARED: tuple[KVEvent, ...] = (AllBlocksCleared(),)


def batch(number: int, events: tuple[KVEvent, ...], run_id: int = 1) -> KVEventBatch:
    return KVEventBatch(run_id, number, events)


def load(num_steps: int = 0) -> EngineLoad:
    return EngineLoad(1, 2, 300, 64, 32, 6500.0, num_steps)
