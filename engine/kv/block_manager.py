"""BlockManager: which KV block belongs to which sequences, and which prefixes can be reused.

A block holds the K and V of ``block_size`` tokens for all layers. It is in exactly one of three states:

    free          nobody uses it and it holds nothing of value         -> ``_free``
    free, cached  nobody uses it, but its prefix can still be hit      -> ``_evictable``, least recently used first
    used          the block tables of ``ref_count`` sequences list it

A full block of a prefill is published under its chained hash *when the step that fills it is scheduled*: a layer writes
K and V before its attention reads, so a sequence scheduled later in the same step may already share it. A block filled
by decodes is published some time later, at the latest when the sequence is freed, and a decode costs nothing here but
once a block: ``Sequence.next_block_boundary`` says when. A hit is verified against the block's token ids and the
identity of the block before it, so a hash collision never serves foreign KV.

A chain is given back its end first, so it is evicted from its end: who holds a block holds its parent too, nearly
always. The exception are sequences that computed the same block side by side, of which one published it: when that one
has gone, the block may be evicted before what follows it in the other. What follows is not hit then (one block in a
thousand in the tests' random load), but is told as published until it is evicted or replaced.

Forked sequences share all blocks; who writes into a shared one first gets a copy of it (copy-on-write). A swapped
sequence keeps its blocks in a host pool instead.

Block tables, forks and the LRU prefix cache follow vLLM's PagedAttention (Kwon et al., 2023). This module knows ids and
numbers only: no tensors, no scheduling policy.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

from engine.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from engine.prefix_hash import BYTES_PER_TOKEN, pack_tokens, packed_block_hash
from engine.sequence import Sequence

__all__ = ["Block", "BlockCounts", "BlockManager", "BlockPair", "Growth", "PrefixMatch"]

BlockPair = tuple[int, int]  # a copy's source and destination

# Blocks that decodes fill are published so many at a time, which costs a third of what it does one by one; nobody can
# ask for them before the answer is known.
PUBLISHED_TOGETHER = 8


@dataclass(slots=True)
class Block:
    """One block of the pool; what it publishes is valid while ``block_hash`` is not None."""

    block_id: int
    ref_count: int = 0
    block_hash: int | None = None
    token_bytes: bytes = b""  # its token ids, as prefix_hash packs them
    parent: int | str = ""  # content id of the block before it, or the cache salt for a first block
    content_id: int = -1  # identity of (parent, tokens): equal for equal prefixes, never reused for another

    def holds(self, token_bytes: bytes, parent: int | str) -> bool:
        """Whether the block holds exactly this content, not merely something with the same hash."""
        return self.token_bytes == token_bytes and self.parent == parent


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
class Growth:
    """A sequence that is to compute tokens up to ``end``, from behind ``match`` if it begins with one."""

    sequence: Sequence
    end: int
    match: PrefixMatch | None = None


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
        num_host_blocks: blocks in the host pool that preempted sequences are swapped to.
        enable_prefix_caching: publish full blocks and match them; off, every block is anonymous.
        record_events: keep what is published and removed until ``take_events``.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = True,
        record_events: bool = False,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.num_evicted = 0
        self.num_released = 0  # times that a block became free: unchanged means that no room was made
        self.num_host_blocks = num_host_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[int, Block] = {}
        self._next_content_id = 0
        self._epoch = 0  # times that the prefix cache was reset
        self._num_shared = 0
        self._free_on_host: deque[int] = deque(range(num_host_blocks))
        self._host_refs: Counter[int] = Counter()
        self._events: list[KVEvent] | None = [] if record_events else None

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated: the free ones, cached or not."""
        return len(self._free) + len(self._evictable)

    @property
    def num_free_host_blocks(self) -> int:
        """Blocks that can be swapped out."""
        return len(self._free_on_host)

    def counts(self) -> BlockCounts:
        """Return the number of blocks in each state."""
        free, cached = len(self._free), len(self._evictable)
        return BlockCounts(free, cached, len(self.blocks) - free - cached, self._num_shared)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.block_size)

    def take_events(self) -> tuple[KVEvent, ...]:
        """Return what was published and removed since the last call, in order."""
        if not self._events:
            return ()
        events, self._events = tuple(self._events), []
        return events

    # --- prefix cache -------------------------------------------------------------------------------------------

    def match_prefix(self, sequence: Sequence) -> PrefixMatch:
        """Return the longest chain of published blocks that the sequence's tokens begin with. Changes nothing."""
        blocks: list[Block] = []
        if self.enable_prefix_caching and not sequence.group.wants_prompt_logprobs:
            parent: int | str = sequence.cache_salt
            size = self.block_size
            for index in range(sequence.num_tokens // size):
                block = self._by_hash.get(sequence.block_hash(index, size))
                if block is None or not block.holds(
                    pack_tokens(sequence.token_ids[index * size : (index + 1) * size]), parent
                ):
                    break
                blocks.append(block)
                parent = block.content_id
        return PrefixMatch(tuple(blocks), len(blocks) * self.block_size)

    def awaited_hash(self, sequence: Sequence) -> int | None:
        """Return the hash whose publication would lengthen the sequence's match, if there is one."""
        index = len(self.match_prefix(sequence).blocks)
        return sequence.block_hash(index, self.block_size) if index < sequence.num_tokens // self.block_size else None

    def is_published(self, block_hash: int | None) -> bool:
        """Whether a block is published under this hash."""
        return block_hash in self._by_hash

    def take_prefix(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Begin the sequence's empty block table with the matched blocks."""
        assert not sequence.block_table
        sequence.cache_epoch = self._epoch
        for block in match.blocks:
            self._retain(block)
            sequence.block_table.append(block.block_id)
            sequence.content_ids.append(block.content_id)
        sequence.num_matched_tokens = match.num_tokens
        # A fully cached sequence still computes its last token, whose logits are needed; its K and V are not rewritten.
        sequence.num_computed_tokens = min(match.num_tokens, sequence.num_tokens - 1)

    def reset_prefix_cache(self) -> None:
        """Forget every published block; blocks in use stay with their sequences.

        Neither those nor what these sequences compute behind them is published any more, wherever they were swapped to.
        """
        self._epoch += 1
        events, self._events = self._events, None
        for block in self.blocks:
            if block.block_hash is not None:
                self._unpublish(block)
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._events = events
        if self._events is not None:
            self._events.append(AllBlocksCleared())

    def published_hashes(self) -> list[int]:
        """Return the hash of every published block, parents before children: what the events so far amount to.

        Where a parent was evicted before its child and published anew, it comes later.
        """
        return list(self._by_hash)  # a block is published after its parent, and a dict keeps that order

    # --- allocation ---------------------------------------------------------------------------------------------

    def num_blocks_to_grow(self, growths: Iterable[Growth]) -> int:
        """Return how many free blocks it takes to let all these sequences grow in one step."""
        needed = 0
        writers: Counter[int] = Counter()
        for growth in growths:
            table = growth.sequence.block_table
            held = len(table)
            if growth.match is None and growth.end == growth.sequence.num_computed_tokens:
                continue
            if growth.match is not None:
                held = len(growth.match.blocks)
                needed += growth.match.num_evictable
            elif (index := self._first_written(growth.sequence)) < min(held, self.num_blocks_for(growth.end)):
                writers[table[index]] += 1
            needed += max(0, self.num_blocks_for(growth.end) - held)
        for block_id, count in writers.items():  # the last one who holds a block writes into it, the others copy it
            needed += min(count, self.blocks[block_id].ref_count - 1)
        return needed

    def allocate(self, sequence: Sequence, num_tokens: int) -> BlockPair | None:
        """Grow the table to hold the first ``num_tokens`` tokens, which this step computes, and publish full blocks.

        Returns:
            The block to copy, and where to, before anything is written, if the next slot was in a shared block.
        """
        table, size = sequence.block_table, self.block_size
        if not table:
            sequence.cache_epoch = self._epoch
        copy = None if sequence.is_single else self._unshare(sequence)
        while len(table) * size < num_tokens:
            table.append(self._take_free_block().block_id)
        if self.enable_prefix_caching:
            is_decode = num_tokens == sequence.num_computed_tokens + 1 and num_tokens > sequence.num_prompt_tokens
            # By their number, not by how many there are: sequences that began together then take different steps.
            if not is_decode or num_tokens // size % PUBLISHED_TOGETHER == 0:
                self._publish_full(sequence, num_tokens)
        # A decode needs nothing before its block is full; a prefill's chunks are looked at one by one.
        sequence.next_block_boundary = len(table) * size if num_tokens >= len(sequence.token_ids) else 0
        return copy

    def extend(self, sequence: Sequence, num_tokens: int) -> int:
        """Grow the table of a sequence that decodes to hold drafts too, which are never published; return by how much.

        ``take_back`` is due before the next step.
        """
        table = sequence.block_table
        missing = self.num_blocks_for(num_tokens) - len(table)
        for _ in range(missing):
            table.append(self._take_free_block().block_id)
        return max(0, missing)

    def take_back(self, sequence: Sequence) -> None:
        """Take back what ``extend`` has given and the sequence's computed tokens do not fill."""
        table = sequence.block_table
        while len(table) > self.num_blocks_for(sequence.num_computed_tokens):
            block = self.blocks[table.pop()]
            assert block.ref_count == 1
            assert block.block_hash is None
            block.ref_count = 0
            self._free.appendleft(block.block_id)  # num_released stays: there is no more room than before the step

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child``, which has the same computed tokens, share all blocks of ``parent``."""
        assert not child.block_table
        for block_id in parent.block_table:
            self._retain(self.blocks[block_id])
        child.block_table = list(parent.block_table)
        child.content_ids = list(parent.content_ids)
        child.cache_epoch = parent.cache_epoch
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_matched_tokens = parent.num_matched_tokens
        child.next_block_boundary = parent.next_block_boundary = 0  # whoever writes first must copy

    def free(self, sequence: Sequence) -> None:
        """Give the sequence's blocks back, the last one first, so that prefixes outlive suffixes in the LRU order."""
        if sequence.host_table:
            self._release_on_host(sequence)
        elif self.enable_prefix_caching:
            self._publish_full(sequence, sequence.num_computed_tokens)
        for block_id in reversed(sequence.block_table):
            self._release(self.blocks[block_id])
        self._forget(sequence)
        sequence.num_computed_tokens = 0

    # --- swapping -----------------------------------------------------------------------------------------------

    def can_swap_out(self, sequences: Sequence_[Sequence]) -> bool:
        """Whether the host pool has room for the blocks of these sequences."""
        distinct = {block_id for sequence in sequences for block_id in sequence.block_table}
        return 0 < len(distinct) <= len(self._free_on_host)

    def swap_out(self, sequences: Sequence_[Sequence]) -> list[BlockPair]:
        """Move the blocks of these sequences to the host pool; what they share stays shared there.

        Returns:
            (block, host block) pairs to copy before anything of the next step is written.
        """
        moved: dict[int, int] = {}
        for sequence in sequences:
            for block_id in sequence.block_table:
                if block_id not in moved:
                    moved[block_id] = self._free_on_host.popleft()
                self._host_refs[moved[block_id]] += 1
            sequence.host_table = [moved[block_id] for block_id in sequence.block_table]
        for sequence in sequences:
            num_computed, host_table = sequence.num_computed_tokens, sequence.host_table
            sequence.host_table = []
            self.free(sequence)
            sequence.num_computed_tokens, sequence.host_table = num_computed, host_table
        return list(moved.items())

    def num_blocks_to_swap_in(self, sequences: Sequence_[Sequence]) -> int:
        """Return how many free blocks it takes to bring these sequences back and let each compute what remains."""
        distinct = {block_id for sequence in sequences for block_id in sequence.host_table}
        needed = len(distinct)
        writers: Counter[int] = Counter()
        for sequence in sequences:
            held = len(sequence.host_table)
            if held:  # else it has not begun yet, and will when its turn comes
                needed += max(0, self.num_blocks_for(sequence.num_tokens) - held)
            if (index := self._first_written(sequence)) < held:
                writers[sequence.host_table[index]] += 1
        return needed + sum(min(count, self._host_refs[block_id] - 1) for block_id, count in writers.items())

    def swap_in(self, sequences: Sequence_[Sequence]) -> list[BlockPair]:
        """Move swapped sequences back into the pool; returns (host block, block) pairs to copy first."""
        moved: dict[int, int] = {}
        for sequence in sequences:
            for host_id in sequence.host_table:
                if host_id in moved:
                    self._retain(self.blocks[moved[host_id]])
                else:
                    moved[host_id] = self._take_free_block().block_id
            sequence.block_table = [moved[host_id] for host_id in sequence.host_table]
            # The copies are exact, but not the blocks that sequences elsewhere may share: publish them anew.
            if self.enable_prefix_caching:
                self._publish_full(sequence, sequence.num_computed_tokens)
        for sequence in sequences:
            self._release_on_host(sequence)
            sequence.host_table = []
        return list(moved.items())

    def _release_on_host(self, sequence: Sequence) -> None:
        for host_id in sequence.host_table:
            self._host_refs[host_id] -= 1
            if not self._host_refs[host_id]:
                del self._host_refs[host_id]
                self._free_on_host.append(host_id)

    def _forget(self, sequence: Sequence) -> None:
        sequence.block_table = []
        sequence.host_table = []
        sequence.content_ids = []
        sequence.num_matched_tokens = 0
        sequence.next_block_boundary = 0

    # --- one block ----------------------------------------------------------------------------------------------

    def _take_free_block(self) -> Block:
        """Give a free block to one sequence, evicting the least recently used cached one if need be."""
        if self._free:
            block = self.blocks[self._free.popleft()]
        else:
            block = self.blocks[self._evictable.popitem(last=False)[0]]
            self._unpublish(block)
            self.num_evicted += 1
        block.ref_count = 1
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
            self.num_released += 1
            if block.block_hash is None:
                self._free.append(block.block_id)
            else:
                self._evictable[block.block_id] = None

    def _first_written(self, sequence: Sequence) -> int:
        """Return the index of the block that the sequence's next token is written to."""
        return max(sequence.num_computed_tokens, sequence.num_matched_tokens) // self.block_size

    def _unshare(self, sequence: Sequence) -> BlockPair | None:
        """Give the sequence a block of its own where it writes next, if others hold that block too."""
        index = self._first_written(sequence)
        if index >= len(sequence.block_table):
            return None
        shared = self.blocks[sequence.block_table[index]]
        if shared.ref_count == 1:
            return None
        own = self._take_free_block()
        self._release(shared)
        sequence.block_table[index] = own.block_id
        return shared.block_id, own.block_id

    def _publish_full(self, sequence: Sequence, num_tokens: int) -> None:
        """Publish the blocks that the sequence's first ``num_tokens`` tokens fill, as far as they are not yet.

        A block whose twin is published already, and used, stays anonymous.
        """
        size, contents, hashes = self.block_size, sequence.content_ids, sequence.block_hashes
        first, last = len(contents), num_tokens // size
        if first >= last or sequence.cache_epoch != self._epoch:
            return
        packed, width = pack_tokens(sequence.token_ids[first * size : last * size]), size * BYTES_PER_TOKEN
        parent: int | str = contents[-1] if contents else sequence.cache_salt
        parent_hash = hashes[first - 1] if first else sequence.group.root
        for index in range(first, last):
            token_bytes = packed[(index - first) * width : (index - first + 1) * width]
            if index == len(hashes):
                hashes.append(packed_block_hash(parent_hash, token_bytes))
            holder = self._by_hash.get(hashes[index])
            if holder is not None and holder.ref_count == 0 and holder.holds(token_bytes, parent):
                holder = self._take_over(holder, self.blocks[sequence.block_table[index]])
            elif holder is None or not holder.holds(token_bytes, parent):
                if holder is not None:  # a collision, or a chain whose parent was made anew: the newest wins
                    self._displace(holder)
                holder = self.blocks[sequence.block_table[index]]
                self._publish(holder, hashes[index], token_bytes, parent, parent_hash)
            parent, parent_hash = holder.content_id, hashes[index]
            contents.append(parent)

    def _publish(self, block: Block, block_hash: int, token_bytes: bytes, parent: int | str, parent_hash: int) -> None:
        block.block_hash, block.token_bytes, block.parent = block_hash, token_bytes, parent
        block.content_id, self._next_content_id = self._next_content_id, self._next_content_id + 1
        self._by_hash[block_hash] = block
        if self._events is not None:
            self._events.append(BlockStored(block_hash, parent_hash, tuple(array("I", token_bytes))))

    def _take_over(self, twin: Block, block: Block) -> Block:
        """Publish a used block in place of its free twin, which could be evicted before what follows the used one."""
        assert twin.block_hash is not None
        block.block_hash, block.token_bytes, block.parent = twin.block_hash, twin.token_bytes, twin.parent
        block.content_id = twin.content_id
        self._by_hash[twin.block_hash] = block
        twin.block_hash, twin.token_bytes, twin.parent, twin.content_id = None, b"", "", -1
        del self._evictable[twin.block_id]
        self._free.append(twin.block_id)
        self.num_released += 1  # what begins with this block takes one free block less
        return block

    def _displace(self, holder: Block) -> None:
        self._unpublish(holder)
        if holder.ref_count == 0:
            del self._evictable[holder.block_id]
            self._free.append(holder.block_id)

    def _unpublish(self, block: Block) -> None:
        assert block.block_hash is not None
        del self._by_hash[block.block_hash]
        if self._events is not None:
            self._events.append(BlockRemoved(block.block_hash))
        block.block_hash, block.token_bytes, block.parent, block.content_id = None, b"", "", -1

    # --- invariants ---------------------------------------------------------------------------------------------

    def check_integrity(self, sequences: Sequence_[Sequence]) -> None:
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
        self._check_host(sequences)

    def _check_host(self, sequences: Sequence_[Sequence]) -> None:
        uses = Counter(host_id for sequence in sequences for host_id in sequence.host_table)
        assert uses == self._host_refs, "a host block is held by another number of sequences"
        held = sorted([*self._free_on_host, *uses])
        assert held == list(range(self.num_host_blocks)), "a host block is lost or held twice"
        for sequence in sequences:
            assert not (sequence.block_table and sequence.host_table), f"{sequence.request_id} is in both pools"
