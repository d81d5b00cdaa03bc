"""KVMirror: what one engine has published so far, kept beside it, so that it can be told anew without asking it.

It follows the engine's batches by their numbers and knows nothing of sockets. Its owner's thread alone may touch it.
"""

from __future__ import annotations

from itertools import islice

from deployments.kv_messages import REMOVED, STORED, EventsMessage, Snapshot, encode, pack_hashes

__all__ = ["KVMirror"]

# Hashes packed at a time: in between, the engine's thread may have the interpreter.
SLICE = 2**13


class KVMirror:
    """The block hashes that an engine holds behind its last batch."""

    def __init__(self) -> None:
        self.generation = 0
        self.number = -1  # of the last batch; -1: there was none
        self.hashes: set[int] = set()
        self._snapshot: bytes | None = None  # of this state, if somebody asked

    def apply(self, message: EventsMessage) -> None:
        """Follow a batch.

        If batches before it were lost, what they removed is not known: everything older is forgotten then, since a
        snapshot that lacks blocks costs a hit, and one with blocks that are gone is a lie.
        """
        if message.generation != self.generation or message.number != self.number + 1:
            self.hashes.clear()
        for kind, hashes in message.changes():
            if kind == STORED:
                self.hashes.update(hashes)
            elif kind == REMOVED:
                self.hashes.difference_update(hashes)
            else:
                self.hashes.clear()
        self.generation, self.number, self._snapshot = message.generation, message.number, None

    @property
    def has_snapshot(self) -> bool:
        """Whether this state was packed already."""
        return self._snapshot is not None

    def snapshot(self) -> bytes:
        """Return the message that tells this state, built once a state."""
        if self._snapshot is None:
            packed, hashes = bytearray(), iter(self.hashes)
            while some := pack_hashes(islice(hashes, SLICE)):
                packed += some
            self._snapshot = encode(Snapshot(self.generation, self.number, bytes(packed)))
        return self._snapshot
