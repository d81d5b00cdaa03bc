"""Arrivals: host pages that another thread fills with KV from elsewhere; they are published when they are right.

    engine's thread   reserve() -----------------------------> publish() --> the request is queued --> release()
    source's thread             fills pages, block_done() ...... finished()

Reserved pages have no name, so nothing can hit them. A block counts once its bytes have the checksum that was computed
where they were read first. ``publish`` names the leading blocks that count, in the order of the chain, after what
memory holds: if the blocks before them have been lost meanwhile, nothing is published. Pages that a source may still
write to stay pinned until it has called ``finished``, also if no one waits any longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.kv.block_pool import Block
from engine.kv.prefix_cache import PrefixMatch
from engine.kv.tiers.digests import TokenChain
from engine.kv.tiers.host_memory import HostMemory
from engine.kv.tiers.host_pages import HostPages
from engine.kv.tiers.inbox import StepInbox
from engine.kv.tiers.page_format import checksum

__all__ = ["Arrival", "Arrivals"]


@dataclass(slots=True)
class _BlockPages:
    """The reserved pages of one block, of each kind, and which of them have come."""

    pages: list[Block | None]
    has_come: list[bool] = field(default_factory=list)


class Arrival:
    """The reserved pages of consecutive blocks of a text; the sink of one source (see source.py).

    Args:
        chain: the text.
        first_block: index of the first block in the text.
        blocks: of each block, the reserved page of each kind; None: that kind is not wanted.
        memory: of the host pools.
        on_finished: called by the source's thread when it has written the last byte, with its error.
    """

    def __init__(
        self,
        chain: TokenChain,
        first_block: int,
        blocks: list[list[Block | None]],
        memory: HostMemory,
        on_finished: Callable[[Arrival, str | None], None],
    ) -> None:
        self.chain = chain
        self.first_block = first_block
        self.is_cancelled = False
        self.is_finished = self.is_released = False  # set by the engine's thread
        self.epoch = 0  # of the prefix cache when the pages were reserved
        self._blocks = [_BlockPages(pages) for pages in blocks]
        self._memory = memory
        self._on_finished = on_finished
        self._num_done = 0  # leading blocks that have come and are right
        self.num_bytes = 0  # of their pages

    @property
    def num_blocks(self) -> int:
        """Blocks that are wanted."""
        return len(self._blocks)

    @property
    def num_done(self) -> int:
        """Leading blocks that have come and are right."""
        return self._num_done

    def page_buffers(self, index: int) -> list[memoryview | None]:
        """Return the memory for the pages of block ``index`` of the text: see ``ArrivalSink``."""
        pages = self._blocks[index - self.first_block].pages
        return [None if page is None else self._memory.page(kind, page.block_id) for kind, page in enumerate(pages)]

    def block_done(self, index: int, checksums: Sequence[int | None]) -> bool:
        """Verify the pages of a block: see ``ArrivalSink``."""
        if index - self.first_block != self._num_done:
            return False  # out of order: what lies before it is not here
        buffers = self.page_buffers(index)
        for buffer, expected in zip(buffers, checksums, strict=True):
            if buffer is not None and expected is not None and checksum(buffer) != expected:
                return False
        if buffers[0] is not None and checksums[0] is None:
            return False
        has_come = [
            buffer is not None and expected is not None for buffer, expected in zip(buffers, checksums, strict=True)
        ]
        self._blocks[index - self.first_block].has_come = has_come
        self.num_bytes += sum(len(buffer) for buffer, has in zip(buffers, has_come, strict=True) if buffer and has)
        self._num_done += 1  # the last write: the engine's thread reads the leading blocks at any time
        return True

    def finished(self, error: str | None) -> None:
        """Say that nothing more is written: see ``ArrivalSink``."""
        self._on_finished(self, error)

    def arrived(self) -> list[list[Block | None]]:
        """Return the pages of the leading blocks that are right; None for those that did not come."""
        return [
            [page if has_come else None for page, has_come in zip(block.pages, block.has_come, strict=True)]
            for block in self._blocks[: self._num_done]
        ]

    def reserved(self) -> list[tuple[int, Block]]:
        """Return all reserved pages and their kinds."""
        return [(kind, page) for block in self._blocks for kind, page in enumerate(block.pages) if page is not None]


class Arrivals:
    """The arrivals of one engine. The engine's thread calls all methods.

    Args:
        pages: the host pools.
        memory: their bytes.
        inbox: of the engine's thread.
        max_share: reserved pages of each host pool, at most, as a share of the pool.
    """

    def __init__(self, pages: HostPages, memory: HostMemory, inbox: StepInbox, *, max_share: float = 0.5) -> None:
        self._pages = pages
        self._memory = memory
        self._inbox = inbox
        self._max_pages = [int(pool.num_pages * max_share) for pool in pages.pools]
        self._num_pages = [0] * len(pages.pools)
        self._reserved: dict[Arrival, list[tuple[int, Block]]] = {}

    def reserve(
        self,
        chain: TokenChain,
        first_block: int,
        kinds: Sequence[Sequence[int]],
        on_finished: Callable[[Arrival, str | None], None],
        keep: PrefixMatch,
    ) -> Arrival | None:
        """Reserve host pages for the blocks of a text from ``first_block`` on, as far as there is room.

        Args:
            chain: the text.
            first_block: index of the first block.
            kinds: of each block, the kinds of pages that are wanted.
            on_finished: called in this thread when the source has written the last byte, with its error.
            keep: what memory holds of the text; its host pages are kept as long as the arrival.

        Returns:
            None if there is no room for a single block.
        """
        blocks: list[list[Block | None]] = []
        held = self._pages.pin_stored(keep, range(keep.num_blocks))  # before a page is taken, which may evict others
        for kind, _ in held:
            self._num_pages[kind] += 1
        for wanted in kinds:
            if (pages := self._reserve_block(wanted)) is None:
                break
            blocks.append(pages)
            held += [(kind, page) for kind, page in enumerate(pages) if page is not None]
        if not blocks:
            for kind, page in held:
                self._unpin(kind, page)
            return None

        def finished(arrival: Arrival, error: str | None) -> None:
            self._inbox.post(lambda: self._finished(arrival, error, on_finished))

        arrival = Arrival(chain, first_block, blocks, self._memory, finished)
        arrival.epoch = self._pages.cache.epoch
        self._reserved[arrival] = held
        return arrival

    def _reserve_block(self, kinds: Sequence[int]) -> list[Block | None] | None:
        """Reserve pages for one block; None if a pool has no room."""
        pages: list[Block | None] = [None] * len(self._pages.pools)
        for kind in kinds:
            page = self._pages.pools[kind].reserve() if self._num_pages[kind] < self._max_pages[kind] else None
            if page is None:
                for other, held in enumerate(pages):
                    if held is not None:
                        self._unpin(other, held)
                return None
            self._num_pages[kind] += 1
            self._memory.expect(kind, page.block_id)
            pages[kind] = page
        return pages

    def publish(self, arrival: Arrival) -> int:
        """Publish the leading blocks that are right; return the blocks of the text that memory holds now.

        They stay pinned until ``release``.
        """
        pages = arrival.arrived()
        if not pages or arrival.epoch != self._pages.cache.epoch:  # the cache was reset: these may be of old weights
            return 0
        first = arrival.first_block
        packed = [arrival.chain.packed(index) for index in range(first, first + len(pages))]
        return self._pages.publish(arrival.chain, first, pages, packed)

    def release(self, arrival: Arrival) -> None:
        """Unpin the pages of an arrival; those that its source may still write to, when it has finished."""
        arrival.is_cancelled = arrival.is_released = True
        if arrival.is_finished:
            for kind, page in self._reserved.pop(arrival, ()):
                self._unpin(kind, page)

    def cancel(self) -> None:
        """Let the sources of all arrivals write no more: the prefix cache was reset, so that none is published."""
        for arrival in self._reserved:
            arrival.is_cancelled = True

    def _finished(
        self, arrival: Arrival, error: str | None, on_finished: Callable[[Arrival, str | None], None]
    ) -> None:
        arrival.is_finished = True
        if arrival.is_released:
            self.release(arrival)
        on_finished(arrival, error)

    def _unpin(self, kind: int, page: Block) -> None:
        self._num_pages[kind] -= 1
        self._pages.unpin(kind, page)
