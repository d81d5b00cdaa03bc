"""The messages that a replica publishes to every ingress, and their layout on the wire.

A ZeroMQ message has two frames: the topic (topics.py) and a msgpack array with these fields in this order:

    message         fields                                              sent
    EventsMessage   run_id, number, sent_at, [[kind, hashes], ...]  after a step that changed the prefix cache
    AwaitedMessage  hashes                                          when a request joins the queue
    LoadMessage     run_id, number, load or nil                     when the load changes, and every heartbeat
    Snapshot        run_id, number, hashes[, states, saved, shared] on request, to one subscriber

    run_id      identifies one run of the engine, from its start to its end; 0 until it publishes its first batch
    number      consecutive number of the batch of events; in the other messages, of the last batch sent before them.
                A subscriber that finds a number missing has a gap: it ignores events until it gets a snapshot (feed.py)
    sent_at     Unix seconds of the sender
    kind        0 stored, 1 removed, 2 cleared; of a model with recurrent layers also 3 state stored, 4 state removed;
                with a disk cache 5 saved, 6 unsaved; with a shared cache 7 saved there, 8 unsaved there
    hashes      bytes, 64-bit little-endian words
    states      hashes of the blocks after which a hit may resume; absent if the model has no states
    load        an EngineLoad

This module knows neither sockets nor receivers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from deployments.transport.hashes import pack_hashes, unpack_hashes
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
)
from engine.observability.load import EngineLoad

__all__ = [
    "CLEARED",
    "MAX_EVENT_GROUPS",
    "MAX_SNAPSHOT_BYTES",
    "REMOVED",
    "SAVED",
    "SHARED",
    "STATE_REMOVED",
    "STATE_STORED",
    "STORED",
    "UNSAVED",
    "UNSHARED",
    "AwaitedMessage",
    "EventsMessage",
    "LoadMessage",
    "Snapshot",
    "events_message",
]

MAX_SNAPSHOT_BYTES = 64 * 2**20  # 8M blocks
MAX_EVENT_GROUPS = 2**16  # of one step's events

STORED: Final = 0
REMOVED: Final = 1
CLEARED: Final = 2
STATE_STORED: Final = 3
STATE_REMOVED: Final = 4
SAVED: Final = 5
UNSAVED: Final = 6
SHARED: Final = 7
UNSHARED: Final = 8

_Kind: TypeAlias = Literal[0, 1, 2, 3, 4, 5, 6, 7, 8]  # one of the constants above
_KINDS: Final[dict[type[KVEvent], _Kind]] = {
    BlockStored: STORED,
    BlockRemoved: REMOVED,
    AllBlocksCleared: CLEARED,
    StateStored: STATE_STORED,
    StateRemoved: STATE_REMOVED,
    BlockSaved: SAVED,
    BlockUnsaved: UNSAVED,
}
_SHARED_KINDS: Final[dict[type[KVEvent], _Kind]] = {BlockSaved: SHARED, BlockUnsaved: UNSHARED}
_Count: TypeAlias = Annotated[int, Meta(ge=0)]  # at most 64 bits in msgpack
_Number: TypeAlias = Annotated[int, Meta(ge=-1)]  # -1: no batch yet
_Measure: TypeAlias = Annotated[float, Meta(ge=0, le=1e15)]  # excludes NaN and infinity
_Packed: TypeAlias = Annotated[bytes, Meta(max_length=MAX_SNAPSHOT_BYTES)]
_EventGroup: TypeAlias = tuple[_Kind, _Packed]  # consecutive events of one kind


class _Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """A schema: an array of exactly these fields, in this order."""


class EventsMessage(_Message, frozen=True):
    """The changes of the prefix cache in one step."""

    run_id: _Count
    number: _Count
    sent_at: _Measure
    groups: Annotated[list[_EventGroup], Meta(max_length=MAX_EVENT_GROUPS)]

    def changes(self) -> Iterator[tuple[_Kind, Sequence[int]]]:
        """Yield (kind, hashes) in the order of the events."""
        for kind, packed in self.groups:
            yield kind, unpack_hashes(packed)


class AwaitedMessage(_Message, frozen=True):
    """The blocks that a request which joins the queue will need: first cached ones, then ones to be computed."""

    packed: _Packed

    @property
    def hashes(self) -> Sequence[int]:
        """The hashes of a prompt's blocks, in order."""
        return unpack_hashes(self.packed)


class Snapshot(_Message, frozen=True):
    """All cached blocks after batch ``number``, those after which a hit may resume, and those on storage."""

    run_id: _Count
    number: _Number
    packed: _Packed
    packed_states: _Packed | None = None  # None: a hit may resume after every block
    packed_saved: _Packed = b""  # of the disk cache
    packed_shared: _Packed = b""  # of the shared cache

    @property
    def hashes(self) -> Sequence[int]:
        """The hashes of all blocks, in no order."""
        return unpack_hashes(self.packed)

    @property
    def states(self) -> Sequence[int] | None:
        """The hashes of the blocks with a state, in no order; None if the model has no states."""
        return None if self.packed_states is None else unpack_hashes(self.packed_states)

    @property
    def saved(self) -> Sequence[int]:
        """The hashes of the blocks in the disk cache, in no order."""
        return unpack_hashes(self.packed_saved) if self.packed_saved else ()

    @property
    def shared(self) -> Sequence[int]:
        """The hashes of the blocks that the engine knows to be in the shared cache, in no order."""
        return unpack_hashes(self.packed_shared) if self.packed_shared else ()


class LoadMessage(_Message, frozen=True):
    """A load report. Its ``number`` reveals the loss of the last batch, which no later batch would show."""

    run_id: _Count
    number: _Number
    load: EngineLoad | None  # None: the engine has not reported a load yet


def events_message(batch: KVEventBatch, sent_at: float) -> EventsMessage:
    """Return the message of a batch: its events in order."""
    groups: list[tuple[_Kind, list[int]]] = []
    for event in batch.events:
        is_shared = isinstance(event, (BlockSaved, BlockUnsaved)) and event.storage == "shared"
        kind = (_SHARED_KINDS if is_shared else _KINDS)[type(event)]
        if not groups or groups[-1][0] != kind:
            groups.append((kind, []))
        if not isinstance(event, AllBlocksCleared):
            groups[-1][1].append(event.block_hash)
    packed = [(kind, pack_hashes(hashes)) for kind, hashes in groups]
    return EventsMessage(batch.run_id, batch.number, sent_at, packed)
