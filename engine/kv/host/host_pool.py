"""HostPool: pages of one kind in host memory. They keep what the device evicts, and those of swapped sequences.

There is a pool of blocks, one for each window and one for states. The pages of a pool are in one of the states of a
``BlockPool``:

    free          it holds nothing of value
    free, cached  it holds what belongs to a published block, and can be loaded; the least recently used one goes first
    used          a swapped sequence has it, this step loads it, or another thread reads or writes it: it is pinned

A swapped sequence pins its pages. What belongs to a published block is stored under its name too, so it is copied once,
whether the sequence is swapped first or the block is evicted first, and another prompt can hit it. A page that was
loaded is held twice, on the device and here. It is reused before all others, and is not copied if the device evicts it
earlier.

A step may evict more than there are pages. Then it reuses pages that it has just stored, the first one first. A chain
is evicted from its end, so its beginning remains, which can be hit. Only the last content of a page is copied.

The pool knows numbers, names and reference counts. ``PageMemory`` holds the memory itself and copies it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from engine.kv.block_pool import Block, BlockPool
from engine.kv.host.block_store import BlockStore
from engine.kv.page_copies import BlockPair

__all__ = ["HostPool"]


class HostPool(BlockStore):
    """Allocates pages to what the device evicts, and to swapped sequences.

    Args:
        num_pages: size of the pool; 0 turns swapping off, and what the device evicts is lost.
        expires_loaded: reuse loaded pages before all others, because the device holds their content too.
    """

    def __init__(self, num_pages: int, *, expires_loaded: bool = True) -> None:
        self.num_pages = num_pages
        self.pages = BlockPool(num_pages)
        self.on_removed: Callable[[int], None] = lambda block_hash: None
        self._expires_loaded = expires_loaded
        self.by_name: dict[int, Block] = {}
        self.pinned: Counter[int] = Counter()  # host page -> how often: see engine/kv/tiers
        # The copies of this step, and the pages that it loads.
        self._copies_out: dict[int, int] = {}  # host page -> page of the device
        self._copies_in: list[BlockPair] = []
        self._loaded: list[Block] = []

    @property
    def num_free(self) -> int:
        """Pages that can be allocated: the free ones, cached or not."""
        return self.pages.num_free

    # --- the second tier of the device's pool -------------------------------------------------------------------

    def store(self, block: Block, page_id: int) -> bool:
        if not self.num_free and block.block_hash not in self.by_name:
            return False
        self.pages.release(self.keep(block, page_id))
        return True

    def pin(self, page: Block) -> None:
        self.pages.retain(page)

    def load(self, page: Block, page_id: int) -> None:
        self._loaded.append(page)
        self._copies_in.append((page.block_id, page_id))

    def adopt(self, page: Block) -> None:
        assert page.block_hash is not None
        self.by_name[page.block_hash] = page

    def discard(self, block_hash: int) -> None:
        if (page := self.by_name.pop(block_hash, None)) is not None:
            self._forget(page)

    def clear(self) -> None:
        self.take_copies()
        for page in self.by_name.values():
            self._forget(page)
        self.by_name.clear()

    # --- swapped sequences --------------------------------------------------------------------------------------

    def keep(self, block: Block | None, page_id: int) -> Block:
        """Return a host page with what a page of the device holds, and one more user; there must be a free one.

        The page is copied in this step, unless it belongs to a published block and the pool has it.

        Args:
            block: to which the page belongs; None if it belongs to a sequence.
            page_id: the page of the device.
        """
        block_hash = None if block is None else block.block_hash
        page = None if block_hash is None else self.by_name.get(block_hash)
        if page is not None:
            self.pages.retain(page)
            self.pages.retain_longer(page, 0 if block is None else block.retention)
            return page
        if not self.pages.num_uncached:
            self._evict()
        page = self.pages.take()
        if block is not None and block_hash is not None:
            page.copy_content(block)
            self.by_name[block_hash] = page
        self._copies_out[page.block_id] = page_id
        return page

    def bring_back(self, host_id: int, page_id: int) -> None:
        """Copy a page of a swapped sequence to a page of the device in this step."""
        page = self.pages.blocks[host_id]
        self.pin(page)
        self.load(page, page_id)

    def release(self, host_ids: list[int]) -> None:
        """Release a sequence's pages, the last page first, so that its end is reused before its beginning."""
        for host_id in reversed(host_ids):
            self.pages.release(self.pages.blocks[host_id])

    # --- pages that other threads read or write ---------------------------------------------------------------------

    def pin_stored(self, page: Block) -> Block:
        """Return a page of the pool with a pin: it is not reused before ``unpin``."""
        self.pages.retain(page)
        self.pinned[page.block_id] += 1
        return page

    def pin_copy(self, block: Block, page_id: int) -> Block | None:
        """Return a pinned page with what a published block has on a page of the device; None if the pool is full."""
        if not self.num_free and block.block_hash not in self.by_name:
            return None
        page = self.keep(block, page_id)
        self.pinned[page.block_id] += 1
        return page

    def reserve(self) -> Block | None:
        """Return a pinned page without content, for another thread to write; None if the pool is full."""
        if not self.num_free:
            return None
        if not self.pages.num_uncached:
            self._evict()
        page = self.pages.take()
        self._copies_out.pop(page.block_id, None)  # of what it held before, for the next step
        self.pinned[page.block_id] += 1
        return page

    def unpin(self, page: Block, *, is_on_device: bool = False) -> None:
        """Remove a pin; what the device holds too is reused before all else."""
        self.pinned[page.block_id] -= 1
        if not self.pinned[page.block_id]:
            del self.pinned[page.block_id]
        self.pages.release(page)
        if is_on_device:
            self.pages.expire(page)

    # --- a step -------------------------------------------------------------------------------------------------

    @property
    def has_copies(self) -> bool:
        """Whether the next step copies pages."""
        return bool(self._copies_out or self._copies_in)

    def take_copies(self) -> tuple[list[BlockPair], list[BlockPair]]:
        """Return the step's copies, (page, host page) and (host page, page); the next step may reuse the host pages."""
        if not self._copies_out and not self._copies_in:
            return [], []
        copies = [(page_id, host_id) for host_id, page_id in self._copies_out.items()], self._copies_in
        self._copies_out, self._copies_in = {}, []
        for page in self._loaded:
            self.pages.release(page)
            if self._expires_loaded:
                self.pages.expire(page)
        self._loaded.clear()
        return copies

    def _evict(self) -> None:
        """Forget the least recently used page, so that it can be allocated."""
        page = self.pages.choose_evicted()
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
        self.pages.check_integrity(num_users + self.pinned)
        named = {page.block_hash: page for page in self.pages.blocks if page.block_hash is not None}
        assert named == self.by_name, "a page is not found under its name"
        # A fork takes the slot of a snapshot before the step that copies that to the host.
        left = [host_id for host_id in self._copies_out if self.pages.blocks[host_id].block_hash is None]
        assert not left + self._loaded + self._copies_in, "copies of a step are left"
