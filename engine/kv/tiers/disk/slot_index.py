"""SlotIndex: which slot of the disk cache holds which page of one kind, and which slot is written next.

The least recently used page is dropped when a slot is needed. Of a text, the end counts as used earlier than the
beginning, without which the end cannot be used. Slots that are being read or written stay as they are. A page that is
marked as worth keeping is spared a few times, as a block of memory is (block_pool.py); a restart forgets the mark.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from engine.kv.block_pool import MOST_SPARED

__all__ = ["SlotIndex"]


class SlotIndex:
    """The slots of one kind of page. The engine's thread calls it.

    Args:
        num_slots: of the file.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by digest, the least recently used one first
        self._hashes: dict[bytes, int] = {}
        self._retention: dict[bytes, int] = {}  # how often pages are still spared
        self._free = list(range(num_slots - 1, -1, -1))
        self._pins: Counter[int] = Counter()
        self._writing: dict[bytes, int] = {}
        self._orphans: set[int] = set()  # pages that were dropped while they are read

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    @property
    def hashes(self) -> list[int]:
        """The hashes of all pages, the least recently used one first."""
        return [self._hashes[digest] for digest in self._slots]

    def is_writing(self, digest: bytes) -> bool:
        """Whether a page is being written."""
        return digest in self._writing

    def restore(self, pages: Iterable[tuple[int, bytes, int]]) -> None:
        """Take over the slots, digests and hashes of an existing file, the least recently used one first.

        If two slots hold the same page, the later one counts.
        """
        for slot, digest, block_hash in pages:
            self._slots[digest] = slot
            self._slots.move_to_end(digest)
            self._hashes[digest] = block_hash
        used = set(self._slots.values())
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in used]

    def begin(self, digest: bytes) -> tuple[int, int | None] | None:
        """Return a slot to write a page to, and the hash of the page that was dropped for it, if there was one.

        None: all slots are being read or written.
        """
        dropped = None
        if not self._free:
            if (oldest := self._choose_dropped()) is None:
                return None
            dropped = self.drop(oldest)
        self._writing[digest] = slot = self._free.pop()
        return slot, dropped

    def _choose_dropped(self) -> bytes | None:
        """Return the page to drop next; None if all are being read."""
        for _ in range(MOST_SPARED):
            oldest = self._oldest()
            if oldest is None or not self._retention.get(oldest):
                return oldest
            self._retention[oldest] -= 1
            self._slots.move_to_end(oldest)
        return self._oldest()

    def _oldest(self) -> bytes | None:
        """Return the least recently used page that is not being read."""
        return next((name for name, slot in self._slots.items() if not self._pins[slot]), None)

    def commit(self, digest: bytes, block_hash: int) -> None:
        """Record that a page was written."""
        self._slots[digest] = self._writing.pop(digest)
        self._hashes[digest] = block_hash

    def abandon(self, digest: bytes) -> None:
        """Record that a page was not written."""
        self._free.append(self._writing.pop(digest))

    def drop(self, digest: bytes) -> int | None:
        """Forget a page; return its hash. Its slot is free when no one reads it any longer."""
        if digest not in self._slots:
            return None
        slot = self._slots.pop(digest)
        if self._pins[slot]:
            self._orphans.add(slot)
        else:
            self._free.append(slot)
        self._retention.pop(digest, None)
        return self._hashes.pop(digest)

    def pin(self, digest: bytes) -> int | None:
        """Return the slot of a page, which must not be written to before ``unpin``; None if there is no such page."""
        slot = self._slots.get(digest)
        if slot is not None:
            self._pins[slot] += 1
        return slot

    def unpin(self, slot: int) -> None:
        """Record that a slot was read."""
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot in self._orphans:
                self._orphans.remove(slot)
                self._free.append(slot)

    def touch(self, digests: Iterable[bytes], retention: int = 0) -> None:
        """Count pages as used now, the last one as the latest.

        Args:
            digests: of the pages.
            retention: how often they are spared from now on, if that is more often than before.
        """
        for digest in digests:
            if digest in self._slots:
                self._slots.move_to_end(digest)
                if retention:
                    self._retention[digest] = max(retention, self._retention.get(digest, 0))

    def check_integrity(self) -> None:
        """Assert that each slot is in one state."""
        held = [*self._slots.values(), *self._writing.values()]
        assert len(set(held)) == len(held), "a slot holds two pages"
        assert self._retention.keys() <= self._slots.keys(), "a page is kept that is lost"
        assert self._slots.keys() == self._hashes.keys(), "a page has no hash"
        assert len(set(self._free)) == len(self._free), "a slot is twice in the free list"
        assert set(self._free).isdisjoint(held), "a free slot holds a page"
        assert not set(self._free) & set(self._pins), "a free slot is being read"
        assert self._orphans <= set(self._pins), "a dropped page is not read, and its slot is not free"
        assert set(self._free) | set(held) | self._orphans == set(range(self.num_slots)), "a slot is lost"
