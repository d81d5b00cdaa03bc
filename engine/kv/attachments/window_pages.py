"""WindowPages: the pages of the layers with one window, which are freed when no sequence can reach them.

A page holds what a block of the chain holds, for these layers only, and hangs on that block. So a sequence needs no
second block table: its page for a position is that of its block. It holds the pages within reach of its next token:

    blocks of a sequence   [ 4 ][ 9 ][ 2 ][ 7 ][ 5 ]        the next token is in block 5
    their pages              -    -   [ 1 ][ 0 ][ 3 ]        the window reaches back to block 2

A sliding window moves with each token. The reach of a chunk begins where the chunk does, so all of its pages are passed
at once, and a sequence that begins a chunk reaches none.

A page without users stays cached if its block is published, until another page is needed: a later prompt may resume
after it. A match ends where all pages within reach are cached, on the device or in the store. Of the pages that a
sequence has passed, only those are worth storing that are within reach of the end of its prompt, or of where its prompt
parts from a cached one; at all others hardly a prompt resumes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as GenericSequence

import numpy as np
import numpy.typing as npt

from engine.kv.attachments.attached_pages import AttachedPages
from engine.kv.block_pool import Block
from engine.kv.host.host_pool import HostPool
from engine.kv.prefix_cache import PrefixMatch
from engine.sequence import Sequence
from kernels.attention.window import Window, first_key

__all__ = ["NO_CHANGES", "PageChanges", "WindowPages"]

NO_CHANGES = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
PageChanges = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]  # blocks, and the page of each


class WindowPages:
    """Allocates the pages of one window.

    Args:
        index: of the window among those of the model.
        window: which tokens a token attends to.
        num_pages: pages in the pool.
        block_size: tokens of a page.
        blocks: the blocks on which the pages hang.
        num_host_pages: pages of the host pool, for evicted pages and those of swapped sequences.

    Attributes:
        attached: the pages, and the blocks on which they hang.
        pages: the states of the pages.
    """

    def __init__(
        self,
        index: int,
        window: Window,
        num_pages: int,
        block_size: int,
        blocks: GenericSequence[Block],
        num_host_pages: int = 0,
    ) -> None:
        self.window = window
        self._index, self._block_size = index, block_size
        self._changed: set[int] = set()  # blocks that have had another page since the last step
        self.attached = AttachedPages(num_pages, blocks, HostPool(num_host_pages), self._changed.add)
        self.pages = self.attached.pages

    @property
    def num_free(self) -> int:
        """Pages that can be allocated: the free ones, cached or not."""
        return self.pages.num_free

    def first_block(self, position: int) -> int:
        """Return the index of the first block within reach of the token at ``position``."""
        return first_key(self.window, position) // self._block_size

    # --- sequences ----------------------------------------------------------------------------------------------

    def hold(self, match: PrefixMatch) -> None:
        """Hold the pages within reach of a sequence that starts with ``match``, also the stored ones.

        Call it before anything is allocated for the sequence, because that may evict other pages.
        """
        for index in range(self.first_block(match.num_resumed), match.num_blocks):
            block_id = match.block_id(index)
            if block_id in self.attached.by_block:
                self.attached.retain(block_id)
            else:
                self.attached.pin(match, index)

    def start(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Load the pages that ``hold`` has held in the store; the sequence has the blocks of the match."""
        first = sequence.first_pages[self._index] = self.first_block(sequence.num_computed_tokens)
        for index, block_id in enumerate(sequence.block_table[first:], first):
            if self.attached.by_block.get(block_id) is None:
                self.attached.hang(block_id, self.attached.load(match, index))

    def grow(self, sequence: Sequence, first_new: int) -> None:
        """Give the blocks from index ``first_new`` on, which the sequence has just got, a page each."""
        for block_id in sequence.block_table[first_new:]:
            self.attached.hang(block_id, self.attached.take())

    def slide(self, sequence: Sequence) -> None:
        """Release the pages that the sequence's next token cannot reach."""
        first, end = sequence.first_pages[self._index], self.first_block(sequence.num_computed_tokens)
        for index in range(first, end):
            self.attached.release(sequence.block_table[index], is_likely=self._is_resumed_with(sequence, index))
        sequence.first_pages[self._index] = max(first, end)

    def release(self, sequence: Sequence, first: int = 0) -> None:
        """Release the pages of the sequence's blocks from index ``first`` on, the last page first."""
        first = max(first, sequence.first_pages[self._index])
        for block_id in reversed(sequence.block_table[first:]):
            self.attached.release(block_id)

    def fork(self, child: Sequence) -> None:
        """Hold the pages that the parent of ``child`` holds."""
        for block_id in self.held_blocks(child):
            self.attached.retain(block_id)

    def copy(self, shared_id: int, own_id: int) -> None:
        """Give a block that is a copy of a shared one a copy of its page."""
        page, shared = self.attached.take(), self.attached.by_block.get(shared_id)
        assert shared is not None
        self.attached.copy(shared.block_id, page.block_id)
        self.attached.release(shared_id)
        self.attached.hang(own_id, page)

    def swap_in(self, sequence: Sequence, host_ids: list[int]) -> None:
        """Load the pages that a sequence, which has its blocks again, held when it was swapped out."""
        for block_id, host_id in zip(self.held_blocks(sequence), host_ids, strict=True):
            if block_id in self.attached.by_block:  # of another sequence of the request
                self.attached.retain(block_id)
            else:
                page = self.attached.take()
                self.attached.store.bring_back(host_id, page.block_id)
                self.attached.hang(block_id, page)

    def held_blocks(self, sequence: Sequence) -> list[int]:
        """Return the blocks of a sequence whose pages it holds, in order."""
        return sequence.block_table[sequence.first_pages[self._index] :] if sequence.block_table else []

    # --- matches ------------------------------------------------------------------------------------------------

    def num_resumable(self, match: PrefixMatch, num_blocks: int, last_position: int) -> int:
        """Return after how many blocks, at most ``num_blocks``, a match can resume: all pages within reach exist.

        Args:
            match: the blocks of a chain.
            num_blocks: of them, at most.
            last_position: the next token's, at most: the last one of a sequence is always computed.
        """
        while num_blocks:
            first = self.first_block(min(num_blocks * self._block_size, last_position))
            missing = next((i for i in range(num_blocks - 1, first - 1, -1) if not self._has_page(match, i)), None)
            if missing is None:
                return num_blocks
            num_blocks = missing
        return 0

    def num_free_taken(self, match: PrefixMatch) -> int:
        """Return the pages that are no longer free when a sequence starts with ``match``."""
        indices = range(self.first_block(match.num_resumed), match.num_blocks)
        pages = [self.attached.by_block.get(match.block_id(index)) for index in indices]
        return sum(page is None or page.ref_count == 0 for page in pages)

    def _has_page(self, match: PrefixMatch, index: int) -> bool:
        """Whether the device or the store has the page that belongs to block ``index`` of a match."""
        return match.block_id(index) in self.attached.by_block or self.attached.stored(match, index) is not None

    def _is_resumed_with(self, sequence: Sequence, index: int) -> bool:
        """Whether block ``index`` is within reach where other prompts are likely to part from this sequence."""
        parts = (sequence.num_prompt_tokens // self._block_size, sequence.num_chained_tokens // self._block_size)
        return any(self.first_block(part * self._block_size - 1) <= index < part for part in parts)

    # --- a step -------------------------------------------------------------------------------------------------

    def take_changes(self) -> PageChanges:
        """Return the blocks that have had another page since the last call, and their pages."""
        pages = {block_id: page for block_id in sorted(self._changed) if (page := self.attached.by_block.get(block_id))}
        self._changed.clear()
        page_ids = [page.block_id for page in pages.values()]
        return np.array(list(pages), dtype=np.int64), np.array(page_ids, dtype=np.int32)

    def check_integrity(self, sequences: Collection[Sequence], block_ids: Collection[int]) -> None:
        """Assert that each page is in one state and hangs on one block.

        Args:
            sequences: every sequence that may hold some.
            block_ids: the blocks that are used or published.
        """
        held = [
            self.attached.by_block.get(block_id) for sequence in sequences for block_id in self.held_blocks(sequence)
        ]
        assert None not in held, "a sequence lacks a page within reach"
        self.pages.check_integrity(Counter(page.block_id for page in held if page is not None))
        assert not self.attached.copies, "copies of a step are left"
        self.attached.check_integrity(block_ids)
        swapped = [sequence.host_pages[self._index] for sequence in sequences if sequence.host_pages]
        self.attached.store.check_integrity(Counter(host_id for host_ids in swapped for host_id in host_ids))
