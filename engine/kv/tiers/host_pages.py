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

    def match(self, text: HashedTokens) -> PrefixMatch:
        """Return the blocks of a text that memory holds, on the device and then on the host; all of them."""
        return self.cache.match(text)

    def kinds_held(self, match: PrefixMatch, index: int) -> list[int]:
        """Return the kinds of pages that memory holds of block ``index`` of a match."""
        return [0, *(kind for kind, attached in enumerate(self.attached, 1) if attached.has(match, index))]

    def pin(self, match: PrefixMatch, index: int) -> list[tuple[int, Block]]:
        """Pin the host pages of block ``index`` of a match; what only the device holds is copied by the next step.

        Returns:
            Kinds and pages; empty if the pool of blocks is full, without a kind whose pool is.
        """
        block, pool = match.block(index), self.pools[0]
        is_on_device = index < len(match.blocks)
        page = pool.pin_copy(block, block.block_id) if is_on_device else pool.pin_stored(block)
        if page is None:
            return []
        others = [(kind, attached.pin_on_host(match, index)) for kind, attached in enumerate(self.attached, 1)]
        return [(0, page), *((kind, other) for kind, other in others if other is not None)]

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
        match, size = self.match(text), self.blocks.block_size
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
