"""BlockPool: the KV blocks of one engine, or the pages of its host memory; their states and their reference counts.

A block holds the K and V of ``block_size`` tokens for all layers. It is in exactly one of three states:

    free          no sequence uses it, and it holds nothing of value         -> ``_free``, the last one freed first
    free, cached  no sequence uses it, but its prefix can still be hit       -> ``_cached``, least recently used first
    used          the block tables of ``ref_count`` sequences list it

The pool knows blocks and numbers. PrefixCache records which prefix a block holds; BlockManager records which sequences
use it. PrefixCache publishes a block by setting ``Block.block_hash``. A published block becomes a cached one when its
last user releases it.

A cached block may have been marked as worth keeping: its retention. Instead of being evicted it is spared, as if it had
been used just then, as often as its retention says, and then evicted as any other. So it outlives blocks that are not
marked, but not for long if it is not used, and blocks that all are marked are evicted in the order of their use. This
is generalized CLOCK (Smith, 1978) on the order of use. One choice spares a limited number of blocks: where the next one
is marked too, it is evicted nevertheless.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

__all__ = ["MOST_SPARED", "Block", "BlockCounts", "BlockPool"]

MOST_SPARED = 64  # blocks in one choice, which a step waits for


@dataclass(slots=True)
class Block:
    """One block of the pool; the fields after ``block_hash`` are valid while that is not None."""

    block_id: int
    ref_count: int = 0
    block_hash: int | None = None  # the chained hash under which the block is published
    token_bytes: bytes = b""  # its token ids, packed as prefix_hash packs them
    parent: int | str = ""  # content id of the previous block, or the cache salt for a first block
    retention: int = 0  # how often it is spared when it would be evicted
    content_id: int = -1  # identity of (parent, tokens): equal for equal prefixes, never reused for another prefix

    def holds(self, token_bytes: bytes, parent: int | str) -> bool:
        """Whether the block holds exactly this content, and not only content with the same hash."""
        return self.token_bytes == token_bytes and self.parent == parent

    def copy_content(self, other: Block) -> None:
        """Mark the block as holding what another one holds, under the same hash."""
        self.block_hash, self.token_bytes, self.parent = other.block_hash, other.token_bytes, other.parent
        self.content_id, self.retention = other.content_id, other.retention

    def forget_content(self) -> None:
        """Mark the block as not published."""
        self.block_hash, self.token_bytes, self.parent, self.content_id, self.retention = None, b"", "", -1, 0


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; ``free + cached + used`` is the size of the pool, ``shared`` a part of ``used``."""

    free: int
    cached: int
    used: int
    shared: int


class BlockPool:
    """Moves blocks between the states free, cached and used.

    Args:
        num_blocks: size of the pool.

    Attributes:
        blocks: every block; the index is its id.
        num_released: counts releases. While it is unchanged, a request that did not fit need not be checked again.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.num_released = 0
        # The block freed last comes first: its memory is mapped already, and a first write to new memory page-faults.
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_spared: dict[int, int] = {}  # of cached and used blocks: how often each was spared
        self._num_shared = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: the free ones, cached or not."""
        return len(self._free) + len(self._cached)

    @property
    def num_uncached(self) -> int:
        """Blocks that ``take`` can give before a cached one must be evicted."""
        return len(self._free)

    def choose_evicted(self) -> Block:
        """Return the cached block to evict next: the least recently used one that is not spared this time."""
        assert self._cached, "the pool cannot hold what is scheduled: no block is free or cached"
        for _ in range(MOST_SPARED):
            block = self.blocks[next(iter(self._cached))]
            if not block.retention or self._num_spared.get(block.block_id, 0) >= block.retention:
                return block
            self._num_spared[block.block_id] = self._num_spared.get(block.block_id, 0) + 1
            self._cached.move_to_end(block.block_id)
        return self.blocks[next(iter(self._cached))]

    def retain_longer(self, block: Block, retention: int) -> None:
        """Mark a published block, or page, as worth keeping; the highest retention counts, from now on."""
        if retention and block.block_hash is not None:
            block.retention = max(block.retention, retention)
            self._num_spared.pop(block.block_id, None)

    def counts(self) -> BlockCounts:
        """Return the number of blocks in each state."""
        free, cached = len(self._free), len(self._cached)
        return BlockCounts(free, cached, len(self.blocks) - free - cached, self._num_shared)

    def take(self) -> Block:
        """Give a free block that is not cached to one user, and return it."""
        block = self.blocks[self._free.popleft()]
        block.ref_count = 1
        return block

    def return_unused(self, block: Block) -> None:
        """Undo ``take`` of a block that was not published. It is the next block to be taken."""
        assert block.ref_count == 1
        assert block.block_hash is None
        block.ref_count = 0
        self._free.appendleft(block.block_id)  # num_released is unchanged: no more blocks are free than before ``take``

    def retain(self, block: Block) -> None:
        """Add a user to a cached or used block."""
        if block.ref_count == 0:
            self._cached.pop(block.block_id, None)
        elif block.ref_count == 1:
            self._num_shared += 1
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """Remove a user. A block without users is free; if published, it is the most recently used cached one."""
        block.ref_count -= 1
        if block.ref_count == 1:
            self._num_shared -= 1
        elif block.ref_count == 0:
            self.num_released += 1
            if block.block_hash is None:
                self._num_spared.pop(block.block_id, None)
                self._free.appendleft(block.block_id)
            else:
                self._cached[block.block_id] = None

    def uncache(self, block: Block) -> None:
        """Move a cached block, whose content is no longer published, to the free blocks."""
        del self._cached[block.block_id]
        self._num_spared.pop(block.block_id, None)
        self._free.appendleft(block.block_id)

    def expire(self, block: Block) -> None:
        """Make a block the one that is evicted next, if it is a cached one."""
        if block.block_id in self._cached:
            self._cached.move_to_end(block.block_id, last=False)
            self._num_spared[block.block_id] = block.retention

    def check_integrity(self, num_users: Counter[int]) -> None:
        """Assert that every block is in one state, given how many block tables list each block."""
        free, cached = set(self._free), set(self._cached)
        used = {block.block_id: block.ref_count for block in self.blocks if block.ref_count}
        published = {block.block_id for block in self.blocks if block.block_hash is not None}
        assert len(free) == len(self._free), "a block is twice in the free list"
        wrong = [
            f"{self.blocks[block_id]}: {num_users[block_id]} tables list it"
            for block_id in used.keys() | num_users.keys()
            if used.get(block_id, 0) != num_users[block_id]
        ]
        assert not wrong, wrong
        assert cached == published - used.keys(), f"in the wrong list: {cached ^ (published - used.keys())}"
        rest = set(range(len(self.blocks))) - used.keys() - cached
        assert free == rest, f"in the wrong list: {free ^ rest}"
        spared = {block_id: self.blocks[block_id] for block_id in self._num_spared if block_id in published}
        wrong = [str(block) for block in spared.values() if self._num_spared[block.block_id] > block.retention]
        assert not wrong, f"spared more often than their retention says: {wrong}"
        assert not set(self._num_spared) & free, "a free block counts as spared"
        assert self._num_shared == sum(count > 1 for count in used.values()), "the count of shared is off"
