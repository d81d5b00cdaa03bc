"""Departures: leases of KV pages in host memory, while a thread copies them to a disk or to another engine.

A lease covers consecutive blocks of a text, matched as a prompt is: by token ids and cache key, never by a hash alone.
Their host pages are pinned, so neither eviction nor another arrival reuses them. What only the device holds is copied
to the host pools first, by the copies of the next step. The lease is ready when that step is finished: on a GPU its
copies are only queued when it is launched.

    engine's thread   lease() ------> step with the copies ------> on_ready(lease) ................ pages are free again
    another thread                                                  reads pages, checksums, release()

A lease that is not released in time expires. Its reader may still be reading then, and its pages may change: so the
reader computes ``checksums`` through the lease, which says whether it was valid until the end of the computation, and
the receiver compares them with the bytes that it got.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from time import monotonic

from engine.kv.block_pool import Block
from engine.kv.tiers.digests import TokenChain
from engine.kv.tiers.host_memory import HostMemory
from engine.kv.tiers.host_pages import HostPages
from engine.kv.tiers.inbox import StepInbox
from engine.kv.tiers.page_format import checksum
from engine.kv.tiers.step_clock import StepClock

__all__ = ["Departures", "Lease", "LeaseExpiredError"]


class LeaseExpiredError(Exception):
    """The lease ended while its pages were read: what was read may be anything."""


class Lease:
    """Pinned host pages of consecutive blocks. Any thread may use it after ``on_ready``.

    Attributes:
        chain: the text, as far as it is covered.
        first_block: index of the first block in the text.
        pages: for each block, the bytes of its page of each kind; None: memory does not hold that page.
    """

    def __init__(
        self,
        chain: TokenChain,
        first_block: int,
        pages: list[list[memoryview | None]],
        release: Callable[[Lease], None],
    ) -> None:
        self.chain = chain
        self.first_block = first_block
        self.pages = pages
        self.is_valid = True
        self._release = release

    @property
    def num_blocks(self) -> int:
        """Blocks that the lease covers."""
        return len(self.pages)

    def checksum(self, index: int, kind: int) -> int | None:
        """Return the checksum of one kind's page of the lease's block ``index``; None: the lease has no such page.

        Raises:
            LeaseExpiredError: if the lease ended before it was computed.
        """
        page = self.pages[index][kind]
        page_checksum = None if page is None else checksum(page)
        if not self.is_valid:
            raise LeaseExpiredError
        return page_checksum

    def checksums(self, index: int) -> list[int | None]:
        """Return the checksum of each kind's page of the lease's block ``index``, counted from ``first_block``.

        Raises:
            LeaseExpiredError: if the lease ended before they were computed.
        """
        return [self.checksum(index, kind) for kind in range(len(self.pages[index]))]

    def release(self) -> None:
        """End the lease; it may have ended already. Any thread may call this."""
        self._release(self)


class Departures:
    """The leases of one engine. The engine's thread calls all methods.

    Args:
        pages: the host pools.
        memory: their bytes.
        inbox: of the engine's thread.
        steps: of the engine.
        max_share: blocks in leases, at most, as a share of the host pool.
        clock: monotonic seconds.
        report: called with the number of leases, now and whenever it changes.
    """

    def __init__(
        self,
        pages: HostPages,
        memory: HostMemory,
        inbox: StepInbox,
        steps: StepClock,
        *,
        max_share: float = 0.25,
        clock: Callable[[], float] = monotonic,
        report: Callable[[int], None] = lambda num_leases: None,
    ) -> None:
        self._pages = pages
        self._memory = memory
        self._inbox = inbox
        self._steps = steps
        self._clock = clock
        self._max_blocks = max(1, int(pages.pools[0].num_pages * max_share))
        self._num_blocks = 0  # in leases
        self._held: dict[Lease, list[tuple[int, Block]]] = {}  # kinds and pages
        self._report = report
        report(0)

    @property
    def num_leases(self) -> int:
        """Leases that have not ended."""
        return len(self._held)

    def lease(
        self,
        chain: TokenChain,
        first_block: int,
        num_blocks: int,
        on_ready: Callable[[Lease], None],
        *,
        timeout_s: float,
    ) -> Lease | None:
        """Pin the blocks of a text from ``first_block`` on that memory holds, at most ``num_blocks``.

        Args:
            chain: the text.
            first_block: index of the first block.
            num_blocks: blocks, at most; the lease may cover fewer.
            on_ready: called in this thread exactly once, at once or after a later step, when the pages can be read; or
                when the lease has ended before, which makes it invalid.
            timeout_s: seconds after which the lease expires.

        Returns:
            The lease; None if memory does not hold block ``first_block``, or the host pool has no room for it, and then
            ``on_ready`` is not called.
        """
        match = self._pages.cache.match(chain)
        room = min(num_blocks, self._max_blocks - self._num_blocks)
        held = self._pages.pin(match, range(first_block, min(first_block + room, match.num_blocks)))
        if not held:
            return None
        lease = Lease(chain, first_block, [self._views(of_block) for of_block in held], self._release)
        self._num_blocks += len(held)
        self._held[lease] = [pair for of_block in held for pair in of_block]
        self._report(self.num_leases)
        self._inbox.post_at(self._clock() + timeout_s, partial(self._expire, weakref.ref(lease)))
        self._steps.call_after(lambda: on_ready(lease), next_step=self._pages.has_copies)
        return lease

    def _release(self, lease: Lease) -> None:
        """End a lease, from any thread."""
        self._inbox.post(partial(self._end, lease))

    def _expire(self, reference: weakref.ref[Lease]) -> None:
        if (lease := reference()) is not None:  # else it has ended long ago
            self._end(lease)

    def _views(self, of_block: list[tuple[int, Block]]) -> list[memoryview | None]:
        views: list[memoryview | None] = [None] * len(self._pages.pools)
        for kind, page in of_block:
            views[kind] = self._memory.page(kind, page.block_id)
        return views

    def reset(self) -> None:
        """End every lease: the prefix cache was reset, and copies may have been dropped."""
        for lease in list(self._held):
            self._end(lease)

    def _end(self, lease: Lease) -> None:
        """Unpin the pages of a lease, once."""
        lease.is_valid = False
        if lease in self._held:
            self._num_blocks -= lease.num_blocks
        for kind, page in self._held.pop(lease, ()):
            self._pages.unpin(kind, page)
        self._report(self.num_leases)
