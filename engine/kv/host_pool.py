"""HostPool: the pages in host memory. They keep blocks that the prefix cache evicts, and those of swapped sequences.

Both kinds share the pages. A page is in one of the states of a ``BlockPool``:

    free          it holds nothing of value
    free, cached  it holds a published block, which can be loaded; the least recently used one is reused first
    used          the host tables of swapped sequences list it, or this step loads it

A swapped sequence pins its pages. A published block of it is stored under its name too, so it is copied once, whether
the sequence is swapped first or the block is evicted first, and another prompt can hit it. A page that was loaded is
held twice, on the device and here. It is reused before all others, and is not copied if the device evicts it earlier.

A step may evict more blocks than there are pages. Then it reuses pages that it has just stored, the first one first. A
chain is evicted from its end, so its beginning remains, which can be hit. Only the last block of a page is copied.

The pool knows numbers, names and reference counts. ``PageMemory`` holds the memory itself and copies it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from engine.kv.block_pool import Block, BlockPool
from engine.kv.block_store import BlockStore

__all__ = ["BlockPair", "HostPool"]

BlockPair = tuple[int, int]  # a copy's source and destination


class HostPool(BlockStore):
    """Allocates pages to evicted blocks and to swapped sequences.

    Args:
        num_pages: size of the pool; 0 turns swapping off, and evicted blocks are lost.
    """

    def __init__(self, num_pages: int) -> None:
        self.pages = BlockPool(num_pages)
        self.on_removed: Callable[[int], None] = lambda block_hash: None
        self._by_hash: dict[int, Block] = {}
        # The copies of this step, and the pages that it loads.
        self._copies_out: dict[int, int] = {}  # page id -> block id
        self._copies_in: list[BlockPair] = []
        self._loaded: list[Block] = []

    @property
    def num_free(self) -> int:
        """Pages that can be allocated: the free ones, cached or not."""
        return self.pages.num_free

    # --- the tier behind the device pool ------------------------------------------------------------------------

    @property
    def names(self) -> Collection[int]:
        return self._by_hash.keys()

    def lookup(self, block_hash: int) -> Block | None:
        return self._by_hash.get(block_hash)

    def store(self, block: Block) -> bool:
        if not self.num_free and block.block_hash not in self._by_hash:
            return False
        self.pages.release(self.keep(block))
        return True

    def pin(self, page: Block) -> None:
        self.pages.retain(page)

    def load(self, page: Block, block: Block) -> None:
        self._loaded.append(page)
        self._copies_in.append((page.block_id, block.block_id))

    def discard(self, block_hash: int) -> None:
        if (page := self._by_hash.pop(block_hash, None)) is not None:
            self._forget(page)

    def clear(self) -> None:
        self.take_copies()
        for page in self._by_hash.values():
            self._forget(page)
        self._by_hash.clear()

    # --- swapped sequences --------------------------------------------------------------------------------------

    def keep(self, block: Block) -> Block:
        """Return a page with what a block of the device holds, and one more user; there must be a free page.

        The block is copied in this step, unless it is published and the pool has it.
        """
        page = None if block.block_hash is None else self._by_hash.get(block.block_hash)
        if page is not None:
            self.pages.retain(page)
            return page
        if self.pages.must_evict:
            self._evict()
        page = self.pages.take()
        if block.block_hash is not None:
            page.copy_content(block)
            self._by_hash[block.block_hash] = page
        self._copies_out[page.block_id] = block.block_id
        return page

    def bring_back(self, page_id: int, block: Block) -> None:
        """Copy a page of a swapped sequence to a block of the device in this step."""
        page = self.pages.blocks[page_id]
        self.pin(page)
        self.load(page, block)

    def release(self, host_table: list[int]) -> None:
        """Release a sequence's pages, the last page first, so that its end is reused before its beginning."""
        for page_id in reversed(host_table):
            self.pages.release(self.pages.blocks[page_id])

    # --- a step -------------------------------------------------------------------------------------------------

    def take_copies(self) -> tuple[list[BlockPair], list[BlockPair]]:
        """Return the step's copies, (block, page) and (page, block); the next step may reuse their pages."""
        if not self._copies_out and not self._copies_in:
            return [], []
        copies = [(block_id, page_id) for page_id, block_id in self._copies_out.items()], self._copies_in
        self._copies_out, self._copies_in = {}, []
        for page in self._loaded:
            self.pages.release(page)
            self.pages.expire(page)
        self._loaded.clear()
        return copies

    def _evict(self) -> None:
        """Forget the least recently used page, so that it can be allocated."""
        page = self.pages.least_recently_used
        assert page.block_hash is not None
        block_hash = page.block_hash
        self.discard(block_hash)
        self.on_removed(block_hash)

    def _forget(self, page: Block) -> None:
        page.forget_content()
        if page.ref_count == 0:
            self.pages.uncache(page)

    def check_integrity(self, num_users: Counter[int]) -> None:
        """Assert that each page is in one state, given how many host tables list each one, and found by its name."""
        self.pages.check_integrity(num_users)
        named = {page.block_hash: page for page in self.pages.blocks if page.block_hash is not None}
        assert named == self._by_hash, "a page is not found under its name"
        left = [*self._copies_out, *self._copies_in, *self._loaded]
        assert not left, "copies of a step are left"
