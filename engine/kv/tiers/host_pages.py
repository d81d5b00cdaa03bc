"""HostPages: the host pools of all kinds of pages, as those see them who read or write pages in other threads.

Pages are pinned while other threads use them. The pools have the order of ``PageFormat.kinds``: blocks, the pages of
each window, snapshots of states.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.attachments.attached_pages import AttachedPages
from engine.kv.block_manager import BlockManager
from engine.kv.block_pool import Block
from engine.kv.host.host_pool import HostPool
from engine.kv.prefix_cache import HashedTokens, PrefixMatch
from engine.kv.tiers.page_format import PageKind

__all__ = ["HostPages"]


class HostPages:
    """Pins, reserves and publishes pages of the host pools. The engine's thread calls all methods, between two steps.

    Args:
        blocks: the block manager.
        kinds: of pages.

    Attributes:
        cache: matches the blocks of a text that memory holds, on the device and then on the host.
        pools: the host pool of each kind.
        attached: the pages of each kind after blocks: those of windows, then snapshots.
    """

    def __init__(self, blocks: BlockManager, kinds: Sequence[PageKind]) -> None:
        self.blocks = blocks
        self.kinds = kinds
        self.cache = blocks.prefix_cache
        self.attached: list[AttachedPages] = blocks.attached
        self.pools: list[HostPool] = [blocks.host_pool, *(attached.store for attached in self.attached)]

    @property
    def block_bytes(self) -> int:
        """Bytes of a page of the pool of blocks."""
        return self.kinds[0].num_bytes

    @property
    def has_copies(self) -> bool:
        """Whether a step must run, because pages are to be copied."""
        return any(pool.has_copies for pool in self.pools)

    def kinds_held(self, match: PrefixMatch, index: int) -> list[int]:
        """Return the kinds of pages that memory holds of block ``index`` of a match."""
        return [0, *(kind for kind, attached in enumerate(self.attached, 1) if attached.has(match, index))]

    def pin_stored(self, match: PrefixMatch, indices: range) -> list[tuple[int, Block]]:
        """Pin the host pages of some blocks of a match; return their kinds and pages."""
        pinned = []
        for index in indices:
            if index >= len(match.blocks):
                pinned.append((0, self.pools[0].pin_stored(match.block(index))))
            for kind, attached in enumerate(self.attached, 1):
                if (page := attached.pin_stored(match, index)) is not None:
                    pinned.append((kind, page))
        return pinned

    def pin(self, match: PrefixMatch, indices: range) -> list[list[tuple[int, Block]]]:
        """Pin the host pages of consecutive blocks of a match; what only the device holds is copied by the next step.

        All that the host has is pinned before the first copy takes a page, which may evict others.

        Returns:
            For each block the kinds and pages; fewer blocks if the pool of blocks is full, and without a kind whose
            pool is.
        """
        pinned = [self.pin_stored(match, range(index, index + 1)) for index in indices]
        for position, (index, of_block) in enumerate(zip(indices, pinned, strict=True)):
            if not self._pin_copies(match, index, of_block):
                for kind, page in (pair for rest in pinned[position:] for pair in rest):
                    self.unpin(kind, page)
                return pinned[:position]
        return pinned

    def _pin_copies(self, match: PrefixMatch, index: int, pinned: list[tuple[int, Block]]) -> bool:
        """Pin copies of what only the device holds of a block; False if the pool of blocks is full."""
        held = {kind for kind, _ in pinned}
        if 0 not in held:
            block = match.block(index)
            if (page := self.pools[0].pin_copy(block, block.block_id)) is None:
                return False
            pinned.append((0, page))
        for kind, attached in enumerate(self.attached, 1):
            if kind not in held and (page := attached.pin_copy(match, index)) is not None:
                pinned.append((kind, page))
        return True

    def unpin(self, kind: int, page: Block) -> None:
        """Remove a pin of a page."""
        self.pools[kind].unpin(page, is_on_device=kind == 0 and self.cache.is_on_device(page.block_hash))

    def publish(
        self, text: HashedTokens, first_block: int, pages: list[list[Block | None]], packed: list[bytes]
    ) -> int:
        """Publish reserved pages that hold what consecutive blocks of a text have; they stay pinned.

        Args:
            text: the text.
            first_block: index of the first block; the blocks before it must be in memory.
            pages: for each block, the filled page of each kind; None: none came.
            packed: the tokens of each block.

        Returns:
            Blocks of the text that are in memory now, all kinds of ``pages`` included; 0 if the blocks before
            ``first_block`` are not.
        """
        match, size = self.cache.match(text), self.blocks.block_size
        if match.num_blocks < first_block:
            return 0
        parent: int | str = match.block(first_block - 1).content_id if first_block else text.cache_key
        for index, (of_block, token_bytes) in enumerate(zip(pages, packed, strict=True), first_block):
            if index < match.num_blocks and match.block(index).holds(token_bytes, parent):
                holder = match.block(index)
            elif (page := of_block[0]) is None:
                return index
            else:
                holder = self.cache.adopt(page, text.block_hash(index, size), token_bytes, parent)
            parent = holder.content_id
            for attached, other in zip(self.attached, of_block[1:], strict=True):
                if other is not None:
                    attached.adopt(holder, other)
        return first_block + len(pages)
