"""FetchPlan: which pages of a prompt's blocks are worth fetching, so that the prompt can resume after them.

    blocks    all that memory lacks, up to where the source has them
    windows   those within reach of the end
    states    the snapshot after the last block

A prompt resumes only where all of these are. So the plan ends at the last block after which memory and the source
together have them, as a match does (resumption.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine.kv.prefix_cache import HashedTokens
from engine.kv.resumption import resumable
from engine.kv.tiers.digests import TokenChain
from engine.kv.tiers.host_pages import HostPages
from engine.kv.tiers.source import PrefixSource, WantedPrefix

__all__ = ["FetchPlan"]


class FetchPlan:
    """What memory lacks of a prompt.

    Args:
        pages: of the host pools.
        text: the prompt.
        chain: its blocks.

    Attributes:
        first_block: after the blocks before it, the prompt can resume with what is in memory.
        last_block: end of the blocks that could be used.
        match: what memory holds.
    """

    def __init__(self, pages: HostPages, text: HashedTokens, chain: TokenChain) -> None:
        self._blocks, self._attached = pages.blocks, pages.attached
        self._size = size = chain.block_size
        self._last_position = text.num_tokens - 1
        self.match = resumed = pages.cache.match(text)
        if self._attached:
            resumed = resumable(self.match, text, size, self._blocks.windows, self._blocks.states)
        self.first_block = -(-resumed.num_resumed // size)
        self.last_block = self._last_position // size if self._blocks.states is not None else chain.num_blocks

    def kinds(self, source: PrefixSource, wanted: WantedPrefix) -> list[list[int]]:
        """Return the kinds of pages to fetch for each block from ``first_block`` on; empty: nothing is worth it."""

        def have(index: int, kind: int) -> bool:
            return self._in_memory(index, kind) or source.has(wanted, index, kind)

        end = self.first_block
        while end < self.last_block and have(end, 0):
            end += 1
        before = -1
        while end > self.first_block and end != before:
            before = end
            for kind, window in enumerate(self._blocks.windows, 1):
                end = self._end_in_reach(window.first_block, end, partial(have, kind=kind))
            while self._has_states and end > self.first_block and not have(end - 1, len(self._attached)):
                end -= 1
        return [self._of_block(index, end) for index in range(self.first_block, end)]

    @property
    def _has_states(self) -> bool:
        return self._blocks.states is not None

    def _in_memory(self, index: int, kind: int) -> bool:
        if index >= self.match.num_blocks:
            return False
        return not kind or self._attached[kind - 1].has(self.match, index)

    def _first_in_reach(self, first_block: Callable[[int], int], end: int) -> int:
        """Return the first block within reach of a window where a prompt resumes after ``end`` blocks."""
        return max(self.first_block, first_block(min(end * self._size, self._last_position)))

    def _end_in_reach(self, first_block: Callable[[int], int], end: int, have: Callable[[int], bool]) -> int:
        """Return after how many blocks, at most ``end``, all pages of a window within reach can be had."""
        while end > self.first_block:
            reach = range(end - 1, self._first_in_reach(first_block, end) - 1, -1)
            missing = next((index for index in reach if not have(index)), None)
            if missing is None:
                break
            end = missing
        return end

    def _of_block(self, index: int, end: int) -> list[int]:
        """Return the kinds of pages that are fetched for one block of a plan that ends after ``end`` blocks."""
        wanted = [0]
        for kind, window in enumerate(self._blocks.windows, 1):
            if index >= self._first_in_reach(window.first_block, end):
                wanted.append(kind)
        if self._has_states and index == end - 1:
            wanted.append(len(self._attached))
        return [kind for kind in wanted if not self._in_memory(index, kind)]
