"""KVMirror: what one engine has published so far, kept beside it, so that it can be told anew without asking it.

It follows the engine's batches by their numbers and knows nothing of sockets. Its owner's thread alone may touch it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from deployments.wire.messages import REMOVED, STORED, EventsMessage, Snapshot, encode, pack_hashes

__all__ = ["KVMirror", "PackedSet"]


class PackedSet:
    """A set of hashes that lie in one array, so that a million of them are copied in milliseconds.

    Walking a set of so many integers takes a quarter of a second, during which the engine would not get the
    interpreter. What is removed is replaced by the last one, so the order says nothing.
    """

    def __init__(self) -> None:
        self.words = array("Q")
        self._places: dict[int, int] = {}  # hash -> its place in ``words``

    def update(self, hashes: Iterable[int]) -> None:
        """Add hashes."""
        for one in hashes:
            if one not in self._places:
                self._places[one] = len(self.words)
                self.words.append(one)

    def difference_update(self, hashes: Iterable[int]) -> None:
        """Take hashes out, if they are there."""
        for one in hashes:
            place = self._places.pop(one, None)
            if place is None:
                continue
            last = self.words.pop()
            if place < len(self.words):
                self.words[place] = last
                self._places[last] = place

    def clear(self) -> None:
        """Take all hashes out."""
        self.words = array("Q")
        self._places = {}


class KVMirror:
    """The block hashes that an engine holds behind its last batch."""

    def __init__(self) -> None:
        self.generation = 0
        self.number = -1  # of the last batch; -1: there was none
        self._hashes = PackedSet()
        self._snapshot: bytes | None = None  # of this state, if somebody asked

    def apply(self, message: EventsMessage) -> None:
        """Follow a batch.

        If batches before it were lost, what they removed is not known: everything older is forgotten then, since a
        snapshot that lacks blocks costs a hit, and one with blocks that are gone is a lie.
        """
        if message.generation != self.generation or message.number != self.number + 1:
            self._hashes.clear()
        for kind, hashes in message.changes():
            if kind == STORED:
                self._hashes.update(hashes)
            elif kind == REMOVED:
                self._hashes.difference_update(hashes)
            else:
                self._hashes.clear()
        self.generation, self.number, self._snapshot = message.generation, message.number, None

    @property
    def has_snapshot(self) -> bool:
        """Whether the message that tells this state was built already."""
        return self._snapshot is not None

    def snapshot(self) -> bytes:
        """Return the message that tells this state, built once a state."""
        if self._snapshot is None:
            self._snapshot = encode(Snapshot(self.generation, self.number, pack_hashes(self._hashes.words)))
        return self._snapshot
