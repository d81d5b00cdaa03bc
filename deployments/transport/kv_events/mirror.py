"""KVMirror: the publisher's copy of the hashes in its engine's prefix cache, for snapshots without the engine's help.

It applies the engine's batches in order. After a gap in their numbers it starts empty: a snapshot that lacks blocks
costs cache hits, one that lists evicted blocks would be wrong. It knows nothing of sockets; one thread may use it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from deployments.transport.hashes import pack_hashes
from deployments.transport.kv_events.codec import encode
from deployments.transport.kv_events.messages import (
    REMOVED,
    SAVED,
    SHARED,
    STATE_REMOVED,
    STATE_STORED,
    STORED,
    UNSAVED,
    UNSHARED,
    EventsMessage,
    Snapshot,
)

__all__ = ["KVMirror", "PackedSet"]


class PackedSet:
    """A set of hashes stored in one array, so that copying a million of them takes milliseconds.

    Iterating over a set of a million integers takes a quarter of a second, during which the engine's thread would wait
    for the interpreter lock. The last hash replaces a removed one, so the order is arbitrary.
    """

    def __init__(self) -> None:
        self.words = array("Q")
        self._index_of: dict[int, int] = {}  # hash -> its index in ``words``

    def update(self, hashes: Iterable[int]) -> None:
        """Add hashes."""
        for block_hash in hashes:
            if block_hash not in self._index_of:
                self._index_of[block_hash] = len(self.words)
                self.words.append(block_hash)

    def difference_update(self, hashes: Iterable[int]) -> None:
        """Remove hashes; unknown ones are ignored."""
        for block_hash in hashes:
            index = self._index_of.pop(block_hash, None)
            if index is None:
                continue
            last = self.words.pop()
            if index < len(self.words):
                self.words[index] = last
                self._index_of[last] = index

    def clear(self) -> None:
        """Remove all hashes."""
        self.words = array("Q")
        self._index_of = {}


class KVMirror:
    """The block hashes that an engine holds after its last batch, those with a state, and those on storage."""

    def __init__(self) -> None:
        self.run_id = 0
        self.number = -1  # of the last batch; -1: no batch yet
        self._hashes = PackedSet()
        self._states: PackedSet | None = None  # None: no event has said that the model has states
        self._saved, self._shared = PackedSet(), PackedSet()
        self._snapshot: bytes | None = None  # of the current state, once it was requested

    def apply(self, message: EventsMessage) -> None:
        """Apply a batch. If batches before it are missing, forget everything older: they may have removed it."""
        if message.run_id != self.run_id or message.number != self.number + 1:
            self._clear()
        for kind, hashes in message.changes():
            if kind == STORED:
                self._hashes.update(hashes)
            elif kind == REMOVED:
                self._hashes.difference_update(hashes)
            elif kind == SAVED:
                self._saved.update(hashes)
            elif kind == UNSAVED:
                self._saved.difference_update(hashes)
            elif kind == SHARED:
                self._shared.update(hashes)
            elif kind == UNSHARED:
                self._shared.difference_update(hashes)
            elif kind in (STATE_STORED, STATE_REMOVED):
                self._states = self._states or PackedSet()
                change = self._states.update if kind == STATE_STORED else self._states.difference_update
                change(hashes)
            else:
                self._clear()
        self.run_id, self.number, self._snapshot = message.run_id, message.number, None

    def _clear(self) -> None:
        self._hashes.clear()
        self._saved.clear()
        self._shared.clear()
        if self._states is not None:
            self._states.clear()

    @property
    def has_snapshot(self) -> bool:
        """Whether the snapshot of the current state is already encoded."""
        return self._snapshot is not None

    def snapshot(self) -> bytes:
        """Return the encoded snapshot of the current state; it is built once."""
        if self._snapshot is None:
            states = None if self._states is None else pack_hashes(self._states.words)
            hashes = pack_hashes(self._hashes.words)
            saved, shared = pack_hashes(self._saved.words), pack_hashes(self._shared.words)
            self._snapshot = encode(Snapshot(self.run_id, self.number, hashes, states, saved, shared))
        return self._snapshot
