"""Saver: decides which blocks are written to a storage, and when.

A text is saved when its request has ended: then its blocks are complete and none of them has been evicted, because the
request held them; and prompts that are answered in a moment do not compete with their own first token. Its blocks are
leased a few at a time, so that the copies of what only the device holds take a small share of a step (copy_pace.py),
and the next few are leased when those are written. So the storage sets the pace, and steps of a busy engine copy a few
blocks now and then. What memory has lost before its turn comes is not saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from engine.kv.tiers.departures import Departures, Lease
from engine.kv.tiers.digests import TokenChain
from engine.kv.tiers.host_pages import HostPages
from engine.kv.tiers.storage_tier import StorageTier

__all__ = ["Saver"]

_MAX_TEXTS = 256  # that wait; the oldest is dropped if the storage is too slow
_LEASE_S = 60.0  # in which they are written


class Saver:
    """The texts whose blocks are to be saved. The engine's thread calls it.

    Args:
        storage: where they are saved.
        pages: of the host pools.
        departures: leases pages.
        max_bytes: returns how many bytes may be leased, and copied by a step, at a time.
    """

    def __init__(
        self, storage: StorageTier[Any], pages: HostPages, departures: Departures, max_bytes: Callable[[], int]
    ) -> None:
        self._storage = storage
        self._pages = pages
        self._departures = departures
        self._texts: deque[tuple[TokenChain, int]] = deque()  # and their retention
        self._position = 0  # of the first text: blocks before it are written, or cannot be
        self._generation = 0
        self._is_waiting = False  # for a lease, or for a write
        self._max_bytes = max_bytes

    @property
    def is_busy(self) -> bool:
        """Whether anything is still to be written."""
        return self._is_waiting or bool(self._texts)

    def add(self, chain: TokenChain, retention: int) -> None:
        """Save the blocks of a text, as far as memory holds them; they are spared as often as ``retention`` says."""
        if self._storage.is_on and chain.num_blocks:
            if len(self._texts) == _MAX_TEXTS:
                del self._texts[1]  # the first one is being saved
            self._texts.append((chain, retention))
            self._go_on()

    def reset(self) -> None:
        """Forget the texts: memory holds none of them."""
        self._texts.clear()
        self._position = 0

    def _go_on(self) -> None:
        """Lease the next blocks that the storage lacks, unless others are being written."""
        while self._texts and not self._is_waiting:
            chain, retention = self._texts[0]
            if not self._position:
                self._generation = self._storage.next_generation()
            first = self._first_lacking(chain) if self._storage.is_on else None
            if first is not None:
                self._is_waiting = True
                num_blocks = max(1, self._max_bytes() // max(1, self._pages.block_bytes))
                if self._departures.lease(chain, first, num_blocks, self._ready, timeout_s=_LEASE_S):
                    return
                self._is_waiting = False  # host memory is full of other leases
            self._storage.touch(chain, retention)
            self._next_text()

    def _next_text(self) -> None:
        self._texts.popleft()
        self._position = 0

    def _first_lacking(self, chain: TokenChain) -> int | None:
        """Return the next block of which memory has a page that the storage lacks."""
        match = self._pages.cache.match(chain)
        for index in range(self._position, min(match.num_blocks, self._storage.max_blocks)):
            if self._storage.lacks(chain, index, 0):
                return index
            if self._pages.attached and any(
                self._storage.lacks(chain, index, kind) for kind in self._pages.kinds_held(match, index)
            ):
                return index
        return None

    def _ready(self, lease: Lease) -> None:
        self._position = lease.first_block + lease.num_blocks  # never back: a small disk may have dropped blocks again
        if lease.is_valid and self._storage.is_on:
            self._storage.save(lease, self._generation, self._done)
        else:
            lease.release()
            self.reset()
            self._done()

    def _done(self) -> None:
        self._is_waiting = False
        self._go_on()
