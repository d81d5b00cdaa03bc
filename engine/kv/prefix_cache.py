"""PrefixCache: finds the blocks that already hold a prompt's prefix.

A full block of a prefill is published under its chained hash *when the step that fills it is scheduled*: a layer writes
K and V before its attention reads, so a sequence scheduled later in the same step can share the block. Blocks that
decodes fill are published later, at the latest when their sequence is freed.

A hit is verified against the block's token ids and the identity of its parent block, so a hash collision never serves
another prompt's KV.

A block that is evicted goes to the ``BlockStore``, if that has room. The match of a prompt continues in the store where
the chain on the device ends. The sum of the events is every hash that can be hit, on the device or in the store.

A chain of blocks is evicted from its end, because the block manager releases a sequence's last block first. There is
one exception: if two sequences compute the same prefix side by side, only one of them publishes it. When that sequence
is freed, its blocks may be evicted before the later blocks of the other. The later blocks then stay published until
they are evicted or replaced, but cannot be hit. In the tests' random load this happens to one block in a thousand.

The LRU prefix cache follows vLLM's PagedAttention (Kwon et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass
from typing import Protocol

from engine.kv.block_pool import Block, BlockPool
from engine.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog
from engine.kv.host.block_store import BlockStore
from engine.kv.prefix_hash import BYTES_PER_TOKEN, pack_tokens, packed_block_hash
from engine.sequence import Sequence

__all__ = ["Attachments", "HashedTokens", "PrefixCache", "PrefixMatch"]


class HashedTokens(Protocol):
    """A text that can be matched: a sequence, or what another engine or a disk wants to read or to leave here."""

    @property
    def token_ids(self) -> GenericSequence[int]:
        """Its tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens, with one that only the device knows yet."""

    @property
    def cache_key(self) -> str:
        """Only texts with equal keys share blocks."""

    def block_hash(self, index: int, block_size: int) -> int:
        """Return the chained hash of full block ``index``."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached blocks that hold the first ``num_tokens`` tokens of a sequence: on the device, then in the store.

    The first ``num_resumed`` tokens need not be computed again: all but the last one of the sequence, or fewer where
    states must be. ``num_chained`` tokens are cached in a chain of blocks, of which the match may be a part.
    """

    blocks: tuple[Block, ...] = ()
    pages: tuple[Block, ...] = ()
    num_tokens: int = 0
    num_resumed: int = 0
    num_chained: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the match, on the device and in the store."""
        return len(self.blocks) + len(self.pages)

    @property
    def num_free_taken(self) -> int:
        """Blocks that are no longer free when a sequence uses the match: cached ones, and those for the pages."""
        return sum(block.ref_count == 0 for block in self.blocks) + len(self.pages)

    def block(self, index: int) -> Block:
        """Return the block of the device, or the page of the store, that holds block ``index`` of the sequence."""
        return self.blocks[index] if index < len(self.blocks) else self.pages[index - len(self.blocks)]

    def block_id(self, index: int) -> int:
        """Return the id of block ``index`` on the device; -1 if only the store has it."""
        return self.blocks[index].block_id if index < len(self.blocks) else -1


class Attachments(Protocol):
    """What hangs on the blocks of the chain beside the keys and values of layers that attend to everything."""

    def move(self, source: Block, target: Block) -> None:
        """``target`` is published instead of ``source``, with the same tokens."""

    def evict(self, block: Block) -> None:
        """The block moves to the store."""

    def detach(self, block_id: int) -> None:
        """The block of the device is no longer published."""

    def lose(self, block_hash: int) -> None:
        """Neither the device nor the store holds a block with this hash any more, or it has other content."""

    def clear(self) -> None:
        """No block is published any more."""


class PrefixCache:
    """Publishes full blocks under their chained hashes, matches prefixes, and evicts.

    Args:
        pool: the blocks.
        block_size: tokens per block.
        store: keeps evicted blocks.
        record_events: collect what is published and removed.

    Attributes:
        epoch: how often the cache was reset; what a sequence of an earlier epoch computes is not published.
        num_loaded: blocks that were loaded from the store.
        num_evicted: cached blocks that left the device because a sequence needed a block.
        attachments: called when something happens to the blocks that they hang on.
        events: what was published and removed.
    """

    def __init__(self, pool: BlockPool, block_size: int, store: BlockStore, *, record_events: bool = False) -> None:
        self.epoch = 0
        self.num_evicted = self.num_loaded = 0
        self.attachments: GenericSequence[Attachments] = ()
        self._pool = pool
        self._block_size = block_size
        self._store, self._stored = store, store.by_name
        store.on_removed = self._report_lost
        self._by_hash: dict[int, Block] = {}
        self._next_content_id = 0
        self.events = EventLog(enabled=record_events)

    def match(self, sequence: HashedTokens) -> PrefixMatch:
        """Return the longest chain of cached blocks that the sequence's tokens begin with. Changes nothing."""
        blocks = self._chain(sequence, 0, sequence.cache_key, self._by_hash.get)
        parent = blocks[-1].content_id if blocks else sequence.cache_key
        pages = self._chain(sequence, len(blocks), parent, self._lookup_page)
        num_tokens = (len(blocks) + len(pages)) * self._block_size
        return PrefixMatch(
            tuple(blocks), tuple(pages), num_tokens, min(num_tokens, sequence.num_tokens - 1), num_tokens
        )

    def _chain(
        self, sequence: HashedTokens, first: int, parent: int | str, lookup: Callable[[int], Block | None]
    ) -> list[Block]:
        """Return the chain of blocks from index ``first`` on that ``lookup`` returns for the sequence's tokens."""
        blocks: list[Block] = []
        size = self._block_size
        for index in range(first, sequence.num_tokens // size):
            block = lookup(sequence.block_hash(index, size))
            if block is None or not block.holds(
                pack_tokens(sequence.token_ids[index * size : (index + 1) * size]), parent
            ):
                break
            blocks.append(block)
            parent = block.content_id
        return blocks

    def _lookup_page(self, block_hash: int) -> Block | None:
        """Return a page of the store that is not on the device too, as blocks after an evicted parent may be."""
        return None if block_hash in self._by_hash else self._stored.get(block_hash)

    def holder(self, sequence: Sequence, index: int) -> Block | None:
        """Return the block of the device that is published with what the sequence's block ``index`` holds."""
        if index >= len(sequence.content_ids):
            return None
        block = self._by_hash.get(sequence.block_hashes[index])
        return block if block is not None and block.content_id == sequence.content_ids[index] else None

    def content_under(self, block_hash: int | None) -> int | None:
        """Return the content id of the block of the device that is published under this hash."""
        block = None if block_hash is None else self._by_hash.get(block_hash)
        return None if block is None else block.content_id

    def is_cached(self, block_hash: int) -> bool:
        """Whether the device or the store holds a block with this hash."""
        return block_hash in self._by_hash or block_hash in self._stored

    def published_hashes(self) -> list[int]:
        """Return the hash of every cached block, the sum of all events so far: first those of blocks on the device.

        Of these, parents come before children. A parent that was evicted before its child and published again comes
        after that child.
        """
        on_device = list(self._by_hash)  # a block is published after its parent, and a dict keeps that order
        return on_device + [name for name in self._stored if name not in self._by_hash]

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Publish the blocks that the sequence's first ``num_tokens`` tokens fill and that are not published yet.

        A block stays unpublished if another used block is published with the same content, or if it holds a token that
        only the device knows yet.
        """
        size, contents, hashes = self._block_size, sequence.content_ids, sequence.block_hashes
        first, last = len(contents), min(num_tokens, len(sequence.token_ids)) // size
        if first >= last or sequence.cache_epoch != self.epoch:
            return
        packed, width = pack_tokens(sequence.token_ids[first * size : last * size]), size * BYTES_PER_TOKEN
        parent: int | str = contents[-1] if contents else sequence.cache_key
        parent_hash = hashes[first - 1] if first else sequence.group.root
        by_hash, blocks, table = self._by_hash, self._pool.blocks, sequence.block_table
        for index in range(first, last):
            token_bytes = packed[(index - first) * width : (index - first + 1) * width]
            if index == len(hashes):
                hashes.append(packed_block_hash(parent_hash, token_bytes))
            holder = by_hash.get(hashes[index])
            if holder is not None and not holder.holds(token_bytes, parent):
                # A hash collision, or a chain with a new parent: the newest content wins.
                self._forget(holder)
                self._lose(hashes[index])
                holder = None
            if holder is None:
                holder = blocks[table[index]]
                self._publish_block(holder, hashes[index], token_bytes, parent)
            elif holder.ref_count == 0:
                holder = self._publish_instead(blocks[table[index]], unused=holder)
            parent, parent_hash = holder.content_id, hashes[index]
            contents.append(parent)

    def hold(self, match: PrefixMatch) -> None:
        """Keep the blocks of a match for one more user, and its pages until they are loaded in this step."""
        for block in match.blocks:
            self._pool.retain(block)
        for page in match.pages:
            self._store.pin(page)

    def load(self, page: Block, block: Block) -> Block:
        """Copy a held page of the store to a block of the device in this step; publish the block and return it."""
        assert page.block_hash is not None
        self._store.load(page, block.block_id)
        self.num_loaded += 1
        block.copy_content(page)
        self._by_hash[page.block_hash] = block
        return block

    def adopt(self, page: Block, block_hash: int, token_bytes: bytes, parent: int | str) -> Block:
        """Publish a page of the store, which was filled from elsewhere; return the block or page that has its content.

        That is another one if the content was computed meanwhile.

        Args:
            page: of the store, without a name.
            block_hash: its chained hash.
            token_bytes: its tokens, packed.
            parent: content id of the block before it, which is published; or the cache key.
        """
        holder = self._by_hash.get(block_hash) or self._stored.get(block_hash)
        if holder is not None and holder.holds(token_bytes, parent):
            return holder
        if block_hash in self._by_hash:  # a hash collision, or a chain with a new parent: see publish
            self._forget(self._by_hash[block_hash])
        if holder is not None:
            self._lose(block_hash)
        self._name(page, block_hash, token_bytes, parent)
        self._store.adopt(page)
        return page

    def is_on_device(self, block_hash: int | None) -> bool:
        """Whether the device holds a block with this hash."""
        return block_hash in self._by_hash

    def take_blocks(self, count: int) -> list[Block]:
        """Allocate ``count`` blocks, none if that is negative; where all free ones are cached, they are evicted."""
        for _ in range(count - self._pool.num_uncached):
            self._evict()
        take = self._pool.take
        return [take() for _ in range(count)]

    def _evict(self) -> None:
        """Move the least recently used cached block to the store, or drop it, so that the pool can allocate it."""
        block = self._pool.choose_evicted()
        if self._store.num_pages and self._store.store(block, block.block_id):
            for attached in self.attachments:
                attached.evict(block)
            self._forget(block)
        else:
            self._report_lost(self._forget(block))
        self.num_evicted += 1

    def reset(self) -> None:
        """Forget every block, also in the store; blocks in use stay with their sequences.

        Those blocks and the blocks that their sequences compute later are never published again, also after a swap.
        """
        self.epoch += 1
        for block in self._by_hash.values():
            block.forget_content()
            if block.ref_count == 0:
                self._pool.uncache(block)
        self._by_hash.clear()
        for attached in self.attachments:
            attached.clear()
        self._store.clear()
        self.events.record(AllBlocksCleared())

    def _publish_block(self, block: Block, block_hash: int, token_bytes: bytes, parent: int | str) -> None:
        page = self._stored.get(block_hash)
        if page is not None and not page.holds(token_bytes, parent):
            self._lose(block_hash)
            page = None
        self._by_hash[block_hash] = block
        if page is not None:
            block.copy_content(page)
            return
        self._name(block, block_hash, token_bytes, parent)

    def _name(self, block: Block, block_hash: int, token_bytes: bytes, parent: int | str) -> None:
        """Give a block or a page new content, and report it."""
        block.block_hash, block.token_bytes, block.parent = block_hash, token_bytes, parent
        block.content_id, self._next_content_id = self._next_content_id, self._next_content_id + 1
        if self.events.enabled:
            self.events.record(BlockStored(block_hash))

    def _publish_instead(self, block: Block, unused: Block) -> Block:
        """Publish a block in use instead of an unused one with the same content; return it.

        The unused block could be evicted before the blocks after the one in use. The same content stays published, so
        no event is recorded.
        """
        assert unused.block_hash is not None
        block.copy_content(unused)
        for attached in self.attachments:
            attached.move(unused, block)
        self._by_hash[unused.block_hash] = block
        unused.forget_content()
        self._pool.uncache(unused)
        self._pool.num_released += 1  # a request that begins with this block now needs one free block less
        return block

    def _forget(self, block: Block) -> int:
        """Forget what a block of the device holds; return its hash."""
        assert block.block_hash is not None
        block_hash = block.block_hash
        del self._by_hash[block_hash]
        block.forget_content()
        for attached in self.attachments:
            attached.detach(block.block_id)
        if block.ref_count == 0:
            self._pool.uncache(block)
        return block_hash

    def _lose(self, block_hash: int) -> None:
        """Forget a hash whose content was replaced."""
        self._store.discard(block_hash)
        self._report_lost(block_hash)

    def _report_lost(self, block_hash: int) -> None:
        """Report a block that the store does not hold, unless the device does."""
        if block_hash in self._by_hash:
            return
        for attached in self.attachments:
            attached.lose(block_hash)
        if self.events.enabled:
            self.events.record(BlockRemoved(block_hash))

    def check_integrity(self) -> None:
        """Assert that hash -> block and block -> hash are inverse, and that the store holds the same content."""
        for block in self._pool.blocks:
            if block.block_hash is not None:
                assert self._by_hash.get(block.block_hash) is block, f"{block} is not found under its hash"
                page = self._stored.get(block.block_hash)
                assert page is None or page.content_id == block.content_id, f"{block} has another content in the store"
        published = sum(block.block_hash is not None for block in self._pool.blocks)
        assert published == len(self._by_hash), "a hash leads to a block that does not publish it"
