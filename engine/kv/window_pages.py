"""WindowPages: the pages of the layers with one sliding window, which are freed when no sequence can reach them.

A page holds what a block of the chain holds, for these layers only, and hangs on that block. So a sequence needs no
second block table: its page for a position is that of its block. It holds the pages within reach of its next token:

    blocks of a sequence   [ 4 ][ 9 ][ 2 ][ 7 ][ 5 ]        the next token is in block 5
    their pages              -    -   [ 1 ][ 0 ][ 3 ]        the window reaches back to block 2

A page is in one of the states of a ``BlockPool``. A page without users stays cached if its block is published, until
another page is needed: a later prompt may resume after it. A match ends where all pages within reach are cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as GenericSequence

import numpy as np
import numpy.typing as npt

from engine.kv.block_pool import Block, BlockPool
from engine.kv.host_pool import BlockPair
from engine.sequence import Sequence

__all__ = ["NO_CHANGES", "PageChanges", "WindowPages"]

NO_CHANGES = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
PageChanges = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]  # blocks, and the page of each


class WindowPages:
    """Allocates the pages of one window.

    Args:
        index: of the window among those of the model.
        window: the tokens, its own included, that a token attends to.
        num_pages: pages in the pool.
        block_size: tokens of a page.
        blocks: the blocks on which the pages hang.

    Attributes:
        pages: the pages; ``block_hash`` of a cached one is the id of the block that it hangs on.
        copies: the copies of this step, which copy-on-write needs.
        num_evicted: cached pages that were lost because another was needed.
    """

    def __init__(
        self, index: int, window: int, num_pages: int, block_size: int, blocks: GenericSequence[Block]
    ) -> None:
        self.window = window
        self.pages = BlockPool(num_pages)
        self.copies: list[BlockPair] = []
        self.num_evicted = 0
        self._index, self._block_size, self._blocks = index, block_size, blocks
        self._page_of: dict[int, Block] = {}  # of each block that has a page
        self._changed: set[int] = set()  # blocks that have had another page since the last step

    @property
    def num_free(self) -> int:
        """Pages that can be allocated: the free ones, cached or not."""
        return self.pages.num_free

    def first_block(self, position: int) -> int:
        """Return the index of the first block within reach of the token at ``position``."""
        return max(0, position - self.window + 1) // self._block_size

    # --- sequences ----------------------------------------------------------------------------------------------

    def start(self, sequence: Sequence) -> None:
        """Hold the pages within reach of the sequence's next token; its blocks are those of a match."""
        first = sequence.first_pages[self._index] = self.first_block(sequence.num_computed_tokens)
        for block_id in sequence.block_table[first:]:
            self.pages.retain(self._page_of[block_id])

    def grow(self, sequence: Sequence, first_new: int) -> None:
        """Give the blocks from index ``first_new`` on, which the sequence has just got, a page each."""
        for block_id in sequence.block_table[first_new:]:
            self._hang(block_id, self._take())

    def slide(self, sequence: Sequence) -> None:
        """Release the pages that the sequence's next token cannot reach."""
        first, end = sequence.first_pages[self._index], self.first_block(sequence.num_computed_tokens)
        if first < end:
            for block_id in sequence.block_table[first:end]:
                self._release(block_id)
            sequence.first_pages[self._index] = end

    def release(self, sequence: Sequence, first: int = 0) -> None:
        """Release the pages of the sequence's blocks from index ``first`` on, the last page first."""
        first = max(first, sequence.first_pages[self._index])
        for block_id in reversed(sequence.block_table[first:]):
            self._release(block_id)

    def fork(self, child: Sequence) -> None:
        """Hold the pages that the parent of ``child`` holds."""
        for block_id in child.block_table[child.first_pages[self._index] :]:
            self.pages.retain(self._page_of[block_id])

    def copy(self, shared_id: int, own_id: int) -> None:
        """Give a block that is a copy of a shared one a copy of its page."""
        page = self._take()
        self.copies.append((self._page_of[shared_id].block_id, page.block_id))
        self._release(shared_id)
        self._hang(own_id, page)

    # --- matches ------------------------------------------------------------------------------------------------

    def num_resumable(self, blocks: GenericSequence[Block], num_blocks: int, last_position: int) -> int:
        """Return after how many blocks, at most ``num_blocks``, a match can resume: all pages within reach exist.

        Args:
            blocks: of the chain.
            num_blocks: of them, at most.
            last_position: the next token's, at most: the last one of a sequence is always computed.
        """
        while num_blocks:
            first = self.first_block(min(num_blocks * self._block_size, last_position))
            missing = next(
                (i for i in range(num_blocks - 1, first - 1, -1) if blocks[i].block_id not in self._page_of), None
            )
            if missing is None:
                return num_blocks
            num_blocks = missing
        return 0

    def num_free_taken(self, blocks: GenericSequence[Block], position: int) -> int:
        """Return the cached pages that a sequence takes which starts with these blocks at ``position``."""
        return sum(self._page_of[block.block_id].ref_count == 0 for block in blocks[self.first_block(position) :])

    # --- what happens to blocks: see Attachments ----------------------------------------------------------------

    def move(self, source: Block, target: Block) -> None:
        """Let the cached page of ``source`` hang on ``target``, which holds the same tokens, unless that has one."""
        page = self._page_of.get(source.block_id)
        if page is None or target.block_id in self._page_of:
            self.detach(source.block_id)
            return
        del self._page_of[source.block_id]
        self._hang(target.block_id, page)
        page.block_hash = target.block_id

    def detach(self, block_id: int) -> None:
        """Free the page of a block that is no longer published, unless sequences hold it."""
        page = self._page_of.get(block_id)
        if page is not None and page.ref_count == 0:
            self._drop(page, block_id)

    def clear(self) -> None:
        """Free every page that no sequence holds, and forget the copies of a step that failed."""
        self.copies.clear()
        for block_id in list(self._page_of):
            self.detach(block_id)

    # --- a step -------------------------------------------------------------------------------------------------

    def take_changes(self) -> PageChanges:
        """Return the blocks that have had another page since the last call, and their pages."""
        blocks = sorted(block_id for block_id in self._changed if block_id in self._page_of)
        self._changed.clear()
        pages = [self._page_of[block_id].block_id for block_id in blocks]
        return np.array(blocks, dtype=np.int64), np.array(pages, dtype=np.int32)

    def take_copies(self) -> list[BlockPair]:
        """Return the copies of this step."""
        copies, self.copies = self.copies, []
        return copies

    def _hang(self, block_id: int, page: Block) -> None:
        self._page_of[block_id] = page
        self._changed.add(block_id)

    def _take(self) -> Block:
        """Allocate a page; if no page is free, the least recently used cached one is lost."""
        if self.pages.must_evict:
            page = self.pages.least_recently_used
            assert page.block_hash is not None
            self._drop(page, page.block_hash)
            self.num_evicted += 1
        return self.pages.take()

    def _release(self, block_id: int) -> None:
        """Remove a user of a block's page; without users it stays cached if the block is published."""
        page = self._page_of[block_id]
        if page.ref_count == 1:
            is_published = self._blocks[block_id].block_hash is not None
            page.block_hash = block_id if is_published else None
            if not is_published:
                del self._page_of[block_id]
        self.pages.release(page)

    def _drop(self, page: Block, block_id: int) -> None:
        del self._page_of[block_id]
        page.forget_content()
        self.pages.uncache(page)

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Assert that each page is in one state and hangs on one block, given every sequence that may hold some."""
        holders: Counter[int] = Counter()
        for sequence in sequences:
            if sequence.block_table:
                holders.update(
                    self._page_of[block_id].block_id
                    for block_id in sequence.block_table[sequence.first_pages[self._index] :]
                )
        self.pages.check_integrity(holders)
        hung: Iterable[int] = [page.block_id for page in self._page_of.values()]
        assert len(set(hung)) == len(self._page_of), "a page hangs on two blocks"
        for block_id, page in self._page_of.items():
            assert page.ref_count or page.block_hash == block_id, f"{page} is cached for another block than {block_id}"
            assert page.ref_count or self._blocks[block_id].block_hash is not None, "a page outlives its block"
        assert not self.copies, "copies of a step are left"
