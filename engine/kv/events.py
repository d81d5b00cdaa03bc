"""KV events: changes of the prefix cache, from which a router builds its index of the prefixes on each replica.

Hashes are the chained ones of ``prefix_hash``, so equal hashes on two replicas mean equal prefixes. The events of a
step are one batch. Batches are numbered within a run of the engine, so that the router detects a gap or a restart. All
events in order give exactly the published blocks. The parent of a stored block is nearly always stored too, but this
is not guaranteed: see ``prefix_cache``.

A model with recurrent layers resumes a hit only where a snapshot of their states was kept. For such a model, all events
in order also give exactly the published blocks that have a snapshot; no other model reports states. The blocks after
the last one with a state are worth nothing to a prompt. A sliding window, too, may shorten a hit, where pages within
its reach were lost. The events do not say that: whether the pages suffice depends on the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockSaved",
    "BlockStored",
    "BlockUnsaved",
    "EventLog",
    "KVEvent",
    "KVEventBatch",
    "StateRemoved",
    "StateStored",
    "StorageName",
]

StorageName: TypeAlias = Literal["disk", "shared"]  # a disk of this engine, or storage that several engines use


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A full block was published and can be hit."""

    block_hash: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block was evicted or replaced."""

    block_hash: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache was reset; no state is left either, and nothing is saved."""


@dataclass(frozen=True, slots=True)
class BlockSaved:
    """Storage holds a block, whether memory does or not: a request can have it read."""

    block_hash: int
    storage: StorageName = "disk"


@dataclass(frozen=True, slots=True)
class BlockUnsaved:
    """Storage no longer holds a block."""

    block_hash: int
    storage: StorageName = "disk"


@dataclass(frozen=True, slots=True)
class StateStored:
    """A published block has a snapshot of the states after its last token: a hit may resume there."""

    block_hash: int


@dataclass(frozen=True, slots=True)
class StateRemoved:
    """The snapshot of a block was evicted, or the block was."""

    block_hash: int


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared | StateStored | StateRemoved | BlockSaved | BlockUnsaved


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """The events of one step. It can be pickled."""

    run_id: int  # of the engine's run: another id means that the engine was restarted with an empty cache
    number: int  # within the run, from 0, without gaps
    events: tuple[KVEvent, ...]


class EventLog:
    """Collects events in order.

    Args:
        enabled: False: ``record`` does nothing.

    Attributes:
        enabled: as given; who records thousands of events in a step asks before making one.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._events: list[KVEvent] = []

    def record(self, event: KVEvent) -> None:
        """Add an event."""
        if self.enabled:
            self._events.append(event)

    def take(self) -> tuple[KVEvent, ...]:
        """Return the events since the last call."""
        events, self._events = tuple(self._events), []
        return events
