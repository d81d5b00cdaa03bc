"""BlockManager: which KV block belongs to which sequences, and which prefixes can be reused.

A block holds the K and V of ``block_size`` tokens for all layers. It is in exactly one of three states:

    free          nobody uses it and it holds nothing of value         -> ``_free``
    free, cached  nobody uses it, but its prefix can still be hit      -> ``_evictable``, least recently used first
    used          the block tables of ``ref_count`` sequences list it

A full block is published under its chained hash *when the step that fills it is scheduled*: a layer writes K and V
before its attention reads, so a sequence scheduled later in the same step may already share it. A hit is verified
against the block's token ids and the identity of the block before it, so a hash collision never serves foreign KV.

Block tables and the LRU prefix cache follow vLLM's PagedAttention (Kwon et al., 2023). This module knows ids and
numbers only: no tensors, no scheduling policy.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from engine.sequence import Sequence

__all__ = ["Block", "BlockCounts", "BlockManager", "PrefixMatch"]


@dataclass(slots=True)
class Block:
    """One block of the pool; what it publishes is valid while ``block_hash`` is not None."""

    block_id: int
    ref_count: int = 0
    block_hash: int | None = None
    token_ids: tuple[int, ...] = ()
    parent: int | str = ""  # content id of the block before it, or the cache salt for a first block
    content_id: int = -1  # identity of (parent, token_ids): equal for equal prefixes, never reused for another

    def holds(self, token_ids: tuple[int, ...], parent: int | str) -> bool:
        """Whether the block holds exactly this content, not merely something with the same hash."""
        return self.token_ids == token_ids and self.parent == parent


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached blocks that a sequence's tokens begin with."""

    blocks: tuple[Block, ...]
    num_tokens: int

    @property
    def num_evictable(self) -> int:
        """Blocks of the match that are free now and would leave the free list if it is taken."""
        return sum(block.ref_count == 0 for block in self.blocks)


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; ``free + cached + used`` is the size of the pool, ``shared`` a part of ``used``."""

    free: int
    cached: int
    used: int
    shared: int


class BlockManager:
    """Hands out the blocks of one pool.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        enable_prefix_caching: publish full blocks and match them; off, every block is anonymous.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.num_evicted = 0
        self._free: deque[int] = deque(range(num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[int, Block] = {}
        self._next_content_id = 0
        self._num_shared = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated: the free ones, cached or not."""
        return len(self._free) + len(self._evictable)

    def counts(self) -> BlockCounts:
        """Return the number of blocks in each state."""
        free, cached = len(self._free), len(self._evictable)
        return BlockCounts(free, cached, len(self.blocks) - free - cached, self._num_shared)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.block_size)

    # --- prefix cache -------------------------------------------------------------------------------------------

    def match_prefix(self, sequence: Sequence) -> PrefixMatch:
        """Return the longest chain of published blocks that the sequence's tokens begin with. Changes nothing."""
        blocks: list[Block] = []
        if self.enable_prefix_caching:
            parent: int | str = sequence.cache_salt
            for index in range(sequence.num_tokens // self.block_size):
                block = self._by_hash.get(sequence.block_hash(index, self.block_size))
                if block is None or not block.holds(self._tokens_of(sequence, index), parent):
                    break
                blocks.append(block)
                parent = block.content_id
        return PrefixMatch(tuple(blocks), len(blocks) * self.block_size)

    def take_prefix(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Begin the sequence's empty block table with the matched blocks."""
        assert not sequence.block_table
        for block in match.blocks:
            self._retain(block)
            sequence.block_table.append(block.block_id)
            sequence.content_ids.append(block.content_id)
        sequence.num_kv_tokens = match.num_tokens
        # A fully cached sequence still computes its last token, whose logits are needed; its K and V are not rewritten.
        sequence.num_computed_tokens = min(match.num_tokens, sequence.num_tokens - 1)

    def reset_prefix_cache(self) -> None:
        """Forget every published block; blocks in use stay with their sequences, unpublished."""
        for block in self.blocks:
            if block.block_hash is not None:
                self._unpublish(block)
        self._free.extend(self._evictable)
        self._evictable.clear()

    # --- allocation ---------------------------------------------------------------------------------------------

    def can_allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the sequence's table can grow to hold its first ``num_tokens`` tokens."""
        return self.num_blocks_for(num_tokens) - len(sequence.block_table) <= self.num_free_blocks

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        """Grow the table to hold the first ``num_tokens`` tokens, which this step computes, and publish full blocks."""
        table = sequence.block_table
        for _ in range(self.num_blocks_for(num_tokens) - len(table)):
            block = self._take_free_block()
            self._retain(block)
            table.append(block.block_id)
        if self.enable_prefix_caching:
            for index in range(len(sequence.content_ids), num_tokens // self.block_size):
                self._publish(sequence, index)

    def free(self, sequence: Sequence) -> None:
        """Give the sequence's blocks back, the last one first, so that prefixes outlive suffixes in the LRU order."""
        for block_id in reversed(sequence.block_table):
            self._release(self.blocks[block_id])
        sequence.block_table.clear()
        sequence.content_ids.clear()
        sequence.num_computed_tokens = 0
        sequence.num_kv_tokens = 0

    # --- one block ----------------------------------------------------------------------------------------------

    def _take_free_block(self) -> Block:
        """Return a free block with nothing published, evicting the least recently used cached one if need be."""
        if self._free:
            return self.blocks[self._free.popleft()]
        block = self.blocks[self._evictable.popitem(last=False)[0]]
        self._unpublish(block)
        self.num_evicted += 1
        return block

    def _retain(self, block: Block) -> None:
        if block.ref_count == 0:
            self._evictable.pop(block.block_id, None)
        elif block.ref_count == 1:
            self._num_shared += 1
        block.ref_count += 1

    def _release(self, block: Block) -> None:
        block.ref_count -= 1
        if block.ref_count == 1:
            self._num_shared -= 1
        elif block.ref_count == 0:
            if block.block_hash is None:
                self._free.append(block.block_id)
            else:
                self._evictable[block.block_id] = None

    def _tokens_of(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        start = index * self.block_size
        return tuple(sequence.token_ids[start : start + self.block_size])

    def _publish(self, sequence: Sequence, index: int) -> None:
        """Publish the sequence's full block ``index`` under its hash, unless a twin already is."""
        block = self.blocks[sequence.block_table[index]]
        parent: int | str = sequence.content_ids[index - 1] if index else sequence.cache_salt
        block_hash, token_ids = sequence.block_hash(index, self.block_size), self._tokens_of(sequence, index)
        holder = self._by_hash.get(block_hash)
        if holder is not None and holder.holds(token_ids, parent):
            sequence.content_ids.append(holder.content_id)
            return
        if holder is not None:  # a collision, or a chain whose parent was evicted and made anew: the newest wins
            self._unpublish(holder)
            if holder.ref_count == 0:
                del self._evictable[holder.block_id]
                self._free.append(holder.block_id)
        block.block_hash, block.token_ids, block.parent = block_hash, token_ids, parent
        block.content_id, self._next_content_id = self._next_content_id, self._next_content_id + 1
        self._by_hash[block_hash] = block
        sequence.content_ids.append(block.content_id)

    def _unpublish(self, block: Block) -> None:
        assert block.block_hash is not None
        del self._by_hash[block.block_hash]
        block.block_hash, block.token_ids, block.parent, block.content_id = None, (), "", -1

    # --- invariants ---------------------------------------------------------------------------------------------

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Assert the invariants, given every sequence that may hold blocks. For tests: it visits the whole pool."""
        uses = Counter(block_id for sequence in sequences for block_id in sequence.block_table)
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & evictable, "a block is free and cached at once"
        for block in self.blocks:
            assert block.ref_count == uses[block.block_id], f"{block}: {uses[block.block_id]} tables list it"
            is_free = block.block_id in free or block.block_id in evictable
            assert is_free == (block.ref_count == 0), f"{block} is in the wrong list"
            assert (block.block_id in evictable) == (block.ref_count == 0 and block.block_hash is not None), block
            if block.block_hash is not None:
                assert self._by_hash.get(block.block_hash) is block, f"{block} is not found under its hash"
        published = sum(block.block_hash is not None for block in self.blocks)
        assert published == len(self._by_hash), "a hash leads to a block that does not publish it"
        assert self._num_shared == sum(block.ref_count > 1 for block in self.blocks), "the count of shared is off"
