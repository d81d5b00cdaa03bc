"""AttachedPages: the pages of one pool that hang on blocks of the chain, at most one on each.

The page of a window holds what its block holds, for the layers with that window; a snapshot holds the states after the
last token of its block. Both are in one of the states of a ``BlockPool``:

    free          it holds nothing of value
    free, cached  it hangs on a block, and a match can resume there; pages with which none is likely to resume are lost
                  first, then the least recently used ones
    used          sequences hold it

A likely page that is lost goes to the store of its kind, if its block is published: because another page is needed, or
with its block. It keeps the name of the block there. So a match finds it whether the block is still on the device, in
the store of blocks, or was loaded again; it is forgotten when neither has the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as GenericSequence

from engine.kv.block_pool import Block, BlockPool
from engine.kv.host.host_pool import HostPool
from engine.kv.page_copies import PageCopies
from engine.kv.prefix_cache import PrefixMatch

__all__ = ["AttachedPages"]


class AttachedPages:
    """Allocates pages that hang on blocks, and is told what happens to these: see ``prefix_cache.Attachments``.

    Args:
        num_pages: pages of the pool.
        blocks: the blocks of the device.
        store: keeps the pages that are lost here.
        on_changed: called with the id of a block of the device whose page has come, gone or changed.
        on_stored: called with the hash of a block whose page the store has got or lost.

    Attributes:
        pages: the pages; ``block_hash`` of a cached one is the id of the block that it hangs on.
        by_block: the page that hangs on each block that has one, by the block's id.
        copies: the copies on the device before the next step, target -> source.
        num_evicted: cached pages that were lost here because another was needed.
    """

    def __init__(
        self,
        num_pages: int,
        blocks: GenericSequence[Block],
        store: HostPool,
        on_changed: Callable[[int], None],
        on_stored: Callable[[int], None] = lambda block_hash: None,
    ) -> None:
        self.pages = BlockPool(num_pages)
        self.store = store
        self.copies: dict[int, int] = {}
        self.num_evicted = 0
        self._blocks, self._on_changed, self._on_stored = blocks, on_changed, on_stored
        store.on_removed = on_stored
        self.by_block: dict[int, Block] = {}
        self._unlikely: dict[int, None] = {}  # cached pages at which no match is likely to resume, the oldest first

    def stored(self, match: PrefixMatch, index: int) -> Block | None:
        """Return the page of the store that belongs to block ``index`` of a match."""
        block = match.block(index)
        assert block.block_hash is not None
        page = self.store.by_name.get(block.block_hash)
        return page if page is not None and page.content_id == block.content_id else None

    def pin(self, match: PrefixMatch, index: int) -> None:
        """Pin the stored page of a match until ``load``: call it before anything is allocated for a sequence."""
        page = self.stored(match, index)
        assert page is not None, "a match resumes with a page that is lost"
        self.store.pin(page)

    def load(self, match: PrefixMatch, index: int) -> Block:
        """Return a new page, to which a pinned page of a match is copied in this step."""
        page, stored = self.take(), self.stored(match, index)
        assert stored is not None
        self.store.load(stored, page.block_id)
        return page

    # --- pages that other threads read or write -----------------------------------------------------------------

    def has(self, match: PrefixMatch, index: int) -> bool:
        """Whether block ``index`` of a match has a page, on the device or in the store, that is worth to be kept."""
        page = self.by_block.get(match.block_id(index))
        is_here = page is not None and page.block_id not in self._unlikely and page.block_id not in self.copies
        return is_here or self.stored(match, index) is not None

    def pin_stored(self, match: PrefixMatch, index: int) -> Block | None:
        """Return the store's page for block ``index`` of a match, pinned; None if it has none."""
        stored = self.stored(match, index)
        return None if stored is None else self.store.pin_stored(stored)

    def pin_copy(self, match: PrefixMatch, index: int) -> Block | None:
        """Return a pinned page of the store for block ``index`` of a match, to which the next step copies its page.

        None if the device has no page that is worth to be kept, or the store has no room.
        """
        page, block = self.by_block.get(match.block_id(index)), match.block(index)
        if page is None or not self.has(match, index) or block.block_hash is None:
            return None
        copy = self.store.pin_copy(block, page.block_id)
        self._on_stored(block.block_hash)
        return copy

    def adopt(self, block: Block, page: Block) -> None:
        """Keep a pinned page of the store, which was filled from elsewhere, for a published block that has none."""
        assert block.block_hash is not None
        if block.block_hash not in self.store.by_name:
            page.copy_content(block)
            self.store.adopt(page)
            self._on_stored(block.block_hash)

    # --- use ----------------------------------------------------------------------------------------------------

    def take(self) -> Block:
        """Allocate a page; if no page is free, an unlikely one is lost, or else the least recently used cached one."""
        if not self.pages.num_uncached:
            unlikely = next(iter(self._unlikely), None)
            page = self.pages.choose_evicted() if unlikely is None else self.pages.blocks[unlikely]
            assert page.block_hash is not None
            self._save(self._blocks[page.block_hash])
            self.detach(page.block_hash)
            self.num_evicted += 1
        return self.pages.take()

    def hang(self, block_id: int, page: Block) -> None:
        """Let a page hang on a block that has none."""
        self.by_block[block_id] = page
        self._on_changed(block_id)

    def cache(self, block_id: int, page: Block, *, is_likely: bool = True) -> None:
        """Let a page hang on a block that has none, without its user.

        Args:
            is_likely: a match is likely to resume with this page; if not, it is lost before all others, and not stored.
        """
        self.hang(block_id, page)
        page.block_hash = block_id
        self.pages.release(page)
        if not is_likely:
            self._unlikely[page.block_id] = None

    def mark_likely(self, page: Block) -> None:
        """Keep a page as if a match had just resumed with it."""
        if page.block_hash is not None and page.ref_count == 0:
            self._unlikely.pop(page.block_id, None)
            self.pages.retain(page)
            self.pages.release(page)

    def retain_longer(self, block_id: int, retention: int) -> None:
        """Mark the cached page of a block, if it has one, as worth keeping."""
        if (page := self.by_block.get(block_id)) is not None:
            self.pages.retain_longer(page, retention)

    def release(self, block_id: int, *, is_likely: bool = True) -> None:
        """Remove a user of a block's page; without users it stays cached if the block is published.

        Args:
            is_likely: as ``cache`` takes it.
        """
        page = self.by_block[block_id]
        if page.ref_count == 1:
            self.copies.pop(page.block_id, None)  # of a step that failed
            if self._blocks[block_id].block_hash is None:
                del self.by_block[block_id]
                page.forget_content()
            else:
                page.block_hash = block_id
                if not is_likely:
                    self._unlikely[page.block_id] = None
        self.pages.release(page)

    def retain(self, block_id: int) -> None:
        """Add a user to a block's page."""
        page = self.by_block[block_id]
        self.pages.retain(page)
        page.block_hash = None
        self._unlikely.pop(page.block_id, None)

    def unhang(self, block_id: int) -> Block:
        """Return the page of a block, which no longer hangs on it."""
        page = self.by_block.pop(block_id)
        page.forget_content()
        self._unlikely.pop(page.block_id, None)
        self._on_changed(block_id)
        return page

    # --- what happens to blocks ---------------------------------------------------------------------------------

    def move(self, source: Block, target: Block) -> None:
        """Let the cached page of ``source`` hang on ``target``, which holds the same tokens, unless that has one."""
        page, existing = self.by_block.get(source.block_id), self.by_block.get(target.block_id)
        if page is None:
            return
        if existing is not None:
            if page.block_id not in self._unlikely:
                self.mark_likely(existing)
            self.detach(source.block_id)
            return
        del self.by_block[source.block_id]
        page.block_hash = target.block_id
        self._on_changed(source.block_id)
        self.hang(target.block_id, page)

    def evict(self, block: Block) -> None:
        """Store the page of a block that moves to the store."""
        if block.block_id in self.by_block:
            self._save(block)
            self.detach(block.block_id)

    def detach(self, block_id: int) -> None:
        """Free the cached page of a block that is no longer published."""
        page = self.by_block.get(block_id)
        if page is None or page.block_hash is None:  # or the users of the block keep it
            return
        self.unhang(block_id)
        self.copies.pop(page.block_id, None)
        if page.ref_count == 0:
            self.pages.uncache(page)

    def lose(self, block_hash: int) -> None:
        """Forget the stored page of a block that neither the device nor the store holds any more."""
        if block_hash in self.store.by_name:
            self.store.discard(block_hash)
            self._on_stored(block_hash)

    def clear(self) -> None:
        """Free every cached page, here and in the store."""
        for block_id in list(self.by_block):
            self.detach(block_id)
        self.store.clear()

    def _save(self, block: Block) -> None:
        """Store the cached page of a published block, if a match is likely to resume with it.

        What this step is going to copy to the page may not be there yet when the step copies to the store.
        """
        page = self.by_block[block.block_id]
        if block.block_hash is not None and page.block_id not in self._unlikely and page.block_id not in self.copies:
            self.store.store(block, page.block_id)
            self._on_stored(block.block_hash)

    # --- a step -------------------------------------------------------------------------------------------------

    def copy(self, source_id: int, target_id: int) -> None:
        """Copy a page before the next step. A source that is itself a target of this step has its content later."""
        self.copies[target_id] = self.copies.get(source_id, source_id)

    def take_copies(self) -> PageCopies:
        """Return the copies of this step."""
        copies = PageCopies(*self.store.take_copies(), [(source, target) for target, source in self.copies.items()])
        self.copies = {}
        return copies

    def check_integrity(self, block_ids: Iterable[int]) -> None:
        """Assert that each cached page hangs on one block, given the blocks that hold something."""
        cached = {page.block_hash: page for page in self.pages.blocks if page.block_hash is not None}
        assert cached.items() <= self.by_block.items(), "a cached page is not found by its block"
        hung = [page.block_id for page in self.by_block.values()]
        assert len(set(hung)) == len(hung), "a page hangs on two blocks"
        assert set(self.by_block) <= set(block_ids), "a page hangs on a block that holds nothing"
