"""BlockManager: the block tables of all sequences.

It composes the ``BlockPool`` (states and reference counts), the ``PrefixCache`` (which block holds which prefix), the
``HostPool``, which is the prefix cache's ``BlockStore`` and the block manager's swap space, and what hangs on blocks:
``WindowPages`` and ``StateSlots``. A sequence starts with the blocks of its prefix match, grows block by block, and
gives every block back when it ends or is preempted.

Forked sequences share all blocks. A sequence that writes into a shared block first gets a copy of it (copy-on-write).

A decode calls the block manager only once per block: when it reaches ``Sequence.next_block_boundary``. A block table is
a list that grows at its end, until drafts give blocks back; every other change makes a new list. So the ranks keep the
tables, and get what was appended (block_tables.py).

Block tables and forks follow vLLM's PagedAttention (Kwon et al., 2023). This module knows ids and numbers only: no
tensors, no scheduling policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as GenericSequence

from engine.kv.block_pool import Block, BlockPool
from engine.kv.growth import Growth, first_written, num_new_blocks
from engine.kv.host_pool import BlockPair, HostPool
from engine.kv.prefix_cache import PrefixCache, PrefixMatch
from engine.kv.resumption import leave_snapshot, plan_snapshots, resumable
from engine.kv.state_slots import StateSlots
from engine.kv.window_pages import WindowPages
from engine.sequence import Sequence

__all__ = ["BlockManager"]

# Decodes publish this many full blocks at a time, which costs a third of publishing them one by one. Earlier hits are
# rare: another prompt would have to contain an answer that is still being generated.
PUBLISHED_TOGETHER = 8


class BlockManager:
    """Allocates blocks to sequences and frees them.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        num_host_blocks: pages of the host pool, to which blocks are evicted and preempted sequences swapped.
        windows: of each sliding window with pages of its own, its tokens and the pages in its pool.
        num_slots: slots for the states of recurrent layers and their snapshots; 0: the model has no states.
        num_snapshots: of these, slots that running sequences leave to snapshots.
        enable_prefix_caching: publish full blocks and match prefixes.
        record_events: collect the KV events of the prefix cache and of snapshots.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        windows: GenericSequence[tuple[int, int]] = (),
        num_slots: int = 0,
        num_snapshots: int = 0,
        enable_prefix_caching: bool = True,
        record_events: bool = False,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.host_pool = HostPool(num_host_blocks)
        self.prefix_cache = PrefixCache(self.pool, block_size, self.host_pool, record_events=record_events)
        self.windows = [
            WindowPages(index, window, num_pages, block_size, self.pool.blocks)
            for index, (window, num_pages) in enumerate(windows)
        ]
        blocks = self.pool.blocks
        self.states = StateSlots(num_slots, num_snapshots, blocks, record_events=record_events) if num_slots else None
        self.prefix_cache.attachments = [*self.windows, *([self.states] if self.states is not None else [])]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated: the free ones, cached or not."""
        return self.pool.num_free

    @property
    def num_growable_blocks(self) -> int:
        """Blocks that can be allocated with a page of each window."""
        return min([self.num_free_blocks, *(window.num_free for window in self.windows)])

    @property
    def num_released(self) -> int:
        """Counts releases. While it is unchanged, a request that did not fit need not be checked again."""
        return self.pool.num_released + sum(window.pages.num_released for window in self.windows)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.block_size)

    # --- prefix caching -----------------------------------------------------------------------------------------

    def match_prefix(self, sequence: Sequence) -> PrefixMatch:
        """Return the cached blocks that the sequence can start with. Changes nothing."""
        if not self.enable_prefix_caching or sequence.group.wants_prompt_logprobs:
            return PrefixMatch()
        match = self.prefix_cache.match(sequence)
        if not self.prefix_cache.attachments:
            return match
        return resumable(match, sequence, self.block_size, self.windows, self.states)

    def awaited_hash(self, sequence: Sequence) -> int | None:
        """Return the hash of the first full block that the sequence's match does not find on the device.

        Once that block is published there, the sequence needs fewer free blocks.
        """
        index = len(self.match_prefix(sequence).blocks)
        return sequence.block_hash(index, self.block_size) if index < sequence.num_tokens // self.block_size else None

    def take_prefix(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Put the matched blocks into the sequence's block table, which is empty; pages are loaded in this step."""
        assert not sequence.block_table
        sequence.cache_epoch = self.prefix_cache.epoch
        self.prefix_cache.hold(match)  # before blocks are taken for the pages, which may evict other pages
        loaded = [self.prefix_cache.load(page, self._take_block()) for page in match.pages]
        for block in (*match.blocks, *loaded):
            sequence.block_table.append(block.block_id)
            sequence.content_ids.append(block.content_id)
        sequence.num_matched_tokens = match.num_tokens
        # A fully cached sequence still computes its last token, whose logits are needed; its K and V are not rewritten.
        sequence.num_computed_tokens = min(match.num_resumed, sequence.num_tokens - 1)
        if self.states is not None:
            sequence.num_chained_tokens = match.num_chained
            num_resumed = match.num_resumed // self.block_size
            self.states.start(sequence, match.blocks[num_resumed - 1] if num_resumed else None)
        if self.windows:
            sequence.first_pages = [0] * len(self.windows)
            for window in self.windows:
                window.start(sequence)

    # --- allocation ---------------------------------------------------------------------------------------------

    def can_grow(self, growths: Collection[Growth]) -> bool:
        """Whether there are enough free blocks, and pages of each window, for all these sequences in one step."""
        num_new = num_new_blocks(growths, self.pool, self.block_size)
        matches = [(growth.match, growth.sequence) for growth in growths if growth.match is not None]
        if num_new + sum(match.num_free_taken for match, _ in matches) > self.num_free_blocks:
            return False
        for window in self.windows:
            taken = sum(
                window.num_free_taken(match.blocks, min(match.num_resumed, sequence.num_tokens - 1))
                for match, sequence in matches
            )
            if num_new + taken > window.num_free:
                return False
        return True

    def allocate(self, sequence: Sequence, num_tokens: int) -> BlockPair | None:
        """Grow the block table to hold the first ``num_tokens`` tokens, which this step computes; publish full blocks.

        Returns:
            The block to copy and its destination, before the step writes, if the next slot is in a shared block.
        """
        if not sequence.block_table:
            sequence.cache_epoch = self.prefix_cache.epoch
        copy = None if sequence.is_single else self._unshare(sequence)
        table, size, num_held = sequence.block_table, self.block_size, len(sequence.block_table)
        while len(table) * size < num_tokens:
            table.append(self._take_block().block_id)
        for window in self.windows:
            window.grow(sequence, num_held)
        if self.enable_prefix_caching:
            is_decode = num_tokens == sequence.num_computed_tokens + 1 and num_tokens > sequence.num_prompt_tokens
            # By the block's number, so that sequences which started together publish in different steps.
            if not is_decode or num_tokens // size % PUBLISHED_TOGETHER == 0:
                self.prefix_cache.publish(sequence, num_tokens)
            if self.states is not None:
                plan_snapshots(sequence, num_tokens, size, self.states, self.prefix_cache, self.pool)
        # A decode needs nothing until its last block is full. A prefill needs blocks for each chunk.
        sequence.next_block_boundary = len(table) * size if num_tokens >= len(sequence.token_ids) else 0
        return copy

    def slide(self, sequences: Iterable[Sequence]) -> None:
        """Release the pages of windows that are beyond the reach of the next token of each of these sequences."""
        for window in self.windows:
            for sequence in sequences:
                window.slide(sequence)

    def extend(self, sequence: Sequence, num_tokens: int) -> int:
        """Grow the block table of a decoding sequence to hold draft tokens too; return the number of blocks added.

        Blocks with draft tokens are not published. The caller must call ``free_draft_blocks`` after the step.
        """
        table = sequence.block_table
        num_held = len(table)
        missing = self.num_blocks_for(num_tokens) - num_held
        for _ in range(missing):
            table.append(self._take_block().block_id)
        for window in self.windows:
            window.grow(sequence, num_held)
        return max(0, missing)

    def free_draft_blocks(self, sequence: Sequence) -> None:
        """Free the blocks that ``extend`` added and that hold none of the sequence's computed tokens."""
        table, num_kept = sequence.block_table, self.num_blocks_for(sequence.num_computed_tokens)
        for window in self.windows:
            window.release(sequence, num_kept)
        while len(table) > num_kept:
            self.pool.return_unused(self.pool.blocks[table.pop()])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child``, which has the same computed tokens, share all blocks of ``parent``."""
        assert not child.block_table
        for block_id in parent.block_table:
            self.pool.retain(self.pool.blocks[block_id])
        child.block_table = list(parent.block_table)
        child.content_ids = list(parent.content_ids)
        child.cache_epoch = parent.cache_epoch
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_matched_tokens = parent.num_matched_tokens
        child.next_block_boundary = parent.next_block_boundary = 0  # the first that writes copies the block
        if self.states is not None:
            self.states.fork(parent, child)
        child.first_pages = list(parent.first_pages)
        for window in self.windows:
            window.fork(child)

    def free(self, sequence: Sequence) -> None:
        """Release the sequence's blocks, the last block first, so that its end is evicted before its beginning."""
        if sequence.host_table:
            self.host_pool.release(sequence.host_table)
            sequence.host_table = []
        elif self.enable_prefix_caching:
            self.prefix_cache.publish(sequence, sequence.num_computed_tokens)
        if self.states is not None:
            leave_snapshot(sequence, self.states, self.prefix_cache, self.pool)
        if sequence.block_table:
            for window in self.windows:
                window.release(sequence)
        for block_id in reversed(sequence.block_table):
            self.pool.release(self.pool.blocks[block_id])
        sequence.block_table = []
        sequence.content_ids = []
        sequence.num_matched_tokens = 0
        sequence.num_computed_tokens = 0
        sequence.next_block_boundary = 0

    def _take_block(self) -> Block:
        """Allocate a block; if all free blocks are cached, one of them is evicted."""
        if self.pool.must_evict:
            self.prefix_cache.evict()
        return self.pool.take()

    def _unshare(self, sequence: Sequence) -> BlockPair | None:
        """Replace the block that the sequence writes next by a copy, if other sequences use that block too."""
        index = first_written(sequence, self.block_size)
        if index >= len(sequence.block_table):
            return None
        shared = self.pool.blocks[sequence.block_table[index]]
        if shared.ref_count == 1:
            return None
        own = self._take_block()
        for window in self.windows:
            window.copy(shared.block_id, own.block_id)
        self.pool.release(shared)
        sequence.block_table = [*sequence.block_table[:index], own.block_id, *sequence.block_table[index + 1 :]]
        return shared.block_id, own.block_id

    # --- swapping -----------------------------------------------------------------------------------------------

    def can_swap_out(self, sequences: Collection[Sequence]) -> bool:
        """Whether these sequences have blocks, and the host pool has room for all of them."""
        distinct = {block_id for sequence in sequences for block_id in sequence.block_table}
        return 0 < len(distinct) <= self.host_pool.num_free

    def swap_out(self, sequences: Collection[Sequence]) -> None:
        """Move the blocks of these sequences to the host pool; shared blocks stay shared there."""
        page_ids: dict[int, int] = {}  # by block id
        for sequence in sequences:
            if self.enable_prefix_caching:  # so that the host pool knows the names of full blocks
                self.prefix_cache.publish(sequence, sequence.num_computed_tokens)
            for block_id in sequence.block_table:
                if block_id in page_ids:
                    self.host_pool.pages.retain(self.host_pool.pages.blocks[page_ids[block_id]])
                else:
                    page_ids[block_id] = self.host_pool.keep(self.pool.blocks[block_id]).block_id
        for sequence in sequences:
            num_computed, block_table = sequence.num_computed_tokens, sequence.block_table
            self.free(sequence)
            sequence.num_computed_tokens = num_computed
            sequence.host_table = [page_ids[block_id] for block_id in block_table]

    def num_blocks_to_swap_in(self, sequences: Collection[Sequence]) -> int:
        """Return how many free blocks these sequences need to be swapped in and compute their remaining tokens."""
        users = Counter(page_id for sequence in sequences for page_id in sequence.host_table)
        needed = len(users)
        writers: Counter[int] = Counter()
        for sequence in sequences:
            held = len(sequence.host_table)
            if held:  # a sequence without host blocks starts in a later step
                needed += max(0, self.num_blocks_for(sequence.num_tokens) - held)
            if (index := first_written(sequence, self.block_size)) < held:
                writers[sequence.host_table[index]] += 1
        return needed + sum(min(count, users[page_id] - 1) for page_id, count in writers.items())

    def swap_in(self, sequences: Collection[Sequence]) -> None:
        """Move swapped-out sequences back into the pool."""
        block_ids: dict[int, int] = {}  # by page id
        for sequence in sequences:
            for page_id in sequence.host_table:
                if page_id in block_ids:
                    self.pool.retain(self.pool.blocks[block_ids[page_id]])
                else:
                    block = self._take_block()
                    self.host_pool.bring_back(page_id, block)
                    block_ids[page_id] = block.block_id
            sequence.block_table = [block_ids[page_id] for page_id in sequence.host_table]
            # The content is the same, but in other blocks than those that were published.
            if self.enable_prefix_caching:
                self.prefix_cache.publish(sequence, sequence.num_computed_tokens)
        for sequence in sequences:
            self.host_pool.release(sequence.host_table)
            sequence.host_table = []

    # --- invariants ---------------------------------------------------------------------------------------------

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Assert the invariants, given every sequence that may have blocks. For tests: it visits the whole pool."""
        self.pool.check_integrity(Counter(block_id for sequence in sequences for block_id in sequence.block_table))
        self.prefix_cache.check_integrity()
        self.host_pool.check_integrity(Counter(host_id for sequence in sequences for host_id in sequence.host_table))
        for window in self.windows:
            window.check_integrity(sequences)
        if self.states is not None:
            held = [block.block_id for block in self.pool.blocks if block.ref_count or block.block_hash is not None]
            self.states.check_integrity(sequences, held)
        for sequence in sequences:
            assert not (sequence.block_table and sequence.host_table), f"{sequence.request_id} is in both pools"
