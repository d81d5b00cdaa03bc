"""BlockManager: the block tables of all sequences.

It composes the ``BlockPool`` (states and reference counts), the ``PrefixCache`` (which block holds which prefix), the
``HostPool``, which is the prefix cache's ``BlockStore`` and the swap space (swapping.py), and what hangs on blocks:
``WindowPages`` and ``StateSlots``, with host pools of their own. A sequence starts with the blocks of its prefix match,
grows block by block, and gives every block back when it ends or is preempted.

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

from engine.kv.attachments.attached_pages import AttachedPages
from engine.kv.attachments.state_slots import StateSlots
from engine.kv.attachments.window_pages import WindowPages
from engine.kv.block_pool import BlockPool
from engine.kv.growth import Growth, first_written, num_new_blocks
from engine.kv.host.host_pool import HostPool
from engine.kv.page_copies import BlockPair
from engine.kv.prefix_cache import PrefixCache, PrefixMatch
from engine.kv.resumption import leave_snapshot, plan_snapshots, resumable
from engine.sequence import Sequence
from kernels.attention.window import Window

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
        windows: each window with pages of its own, and the pages in its pool.
        num_slots: slots for the states of recurrent layers and their snapshots; 0: the model has no states.
        num_snapshots: of these, slots that running sequences leave to snapshots.
        snapshot_interval: tokens of a prefill, whole blocks, after each of which a snapshot is kept; 0: none.
        num_host_window_pages: of each window, pages of its host pool; without them windows have none there.
        num_host_slots: slots of the host pool of states and snapshots.
        enable_prefix_caching: publish full blocks and match prefixes.
        record_events: collect the KV events of the prefix cache and of snapshots.

    Attributes:
        attached: the pages that hang on blocks, of each window, then snapshots of states.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        windows: GenericSequence[tuple[Window, int]] = (),
        num_slots: int = 0,
        num_snapshots: int = 0,
        snapshot_interval: int = 0,
        num_host_window_pages: GenericSequence[int] = (),
        num_host_slots: int = 0,
        enable_prefix_caching: bool = True,
        record_events: bool = False,
    ) -> None:
        assert snapshot_interval % block_size == 0, "snapshots hang on whole blocks"
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.host_pool = HostPool(num_host_blocks)
        self.prefix_cache = PrefixCache(self.pool, block_size, self.host_pool, record_events=record_events)
        blocks, on_host = self.pool.blocks, num_host_window_pages or [0] * len(windows)
        self.windows = [
            WindowPages(index, window, num_pages, block_size, blocks, num_on_host)
            for index, ((window, num_pages), num_on_host) in enumerate(zip(windows, on_host, strict=True))
        ]
        self.states = None
        if num_slots:
            self.states = StateSlots(
                num_slots,
                num_snapshots,
                blocks,
                interval=snapshot_interval,
                num_host_slots=num_host_slots,
                record_events=record_events,
            )
        self.attached: list[AttachedPages] = [window.attached for window in self.windows]
        if self.states is not None:
            self.attached.append(self.states.snapshots)
        self.prefix_cache.attachments = self.attached

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated: the free ones, cached or not."""
        return self.pool.num_free

    @property
    def num_growable_blocks(self) -> int:
        """Blocks that can be allocated with a page of each window."""
        num_free = self.pool.num_free
        return min(num_free, *(window.num_free for window in self.windows)) if self.windows else num_free

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
        """Return the hash of the first full block of a sequence that the device has not cached.

        Once that block is published there, the sequence needs fewer free blocks.
        """
        if not self.enable_prefix_caching or sequence.group.wants_prompt_logprobs:
            return None
        index = len(self.prefix_cache.match(sequence).blocks)
        return sequence.block_hash(index, self.block_size) if index < sequence.num_tokens // self.block_size else None

    def take_prefix(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Put the matched blocks into the sequence's block table, which is empty; pages are loaded in this step."""
        assert not sequence.block_table
        sequence.cache_epoch = self.prefix_cache.epoch
        num_resumed_blocks = match.num_resumed // self.block_size
        self.prefix_cache.hold(match)  # all that it needs before anything is taken, which may evict other pages
        for window in self.windows:
            window.hold(match)
        if self.states is not None:
            self.states.hold(match, num_resumed_blocks)
        loaded = [
            self.prefix_cache.load(page, block)
            for page, block in zip(match.pages, self.prefix_cache.take_blocks(len(match.pages)), strict=True)
        ]
        for block in (*match.blocks, *loaded):
            sequence.block_table.append(block.block_id)
            sequence.content_ids.append(block.content_id)
        sequence.num_matched_tokens = match.num_tokens
        # A fully cached sequence still computes its last token, whose logits are needed; its K and V are not rewritten.
        sequence.num_computed_tokens = match.num_resumed
        sequence.num_chained_tokens = match.num_chained
        sequence.first_pages = [0] * len(self.windows)
        for window in self.windows:
            window.start(sequence, match)
        if self.states is not None:
            self.states.start(sequence, match, num_resumed_blocks)

    # --- allocation ---------------------------------------------------------------------------------------------

    def can_grow(self, growths: Collection[Growth]) -> bool:
        """Whether there are enough free blocks, and pages of each window, for all these sequences in one step."""
        num_new = num_new_blocks(growths, self.pool, self.block_size)
        matches = [growth.match for growth in growths if growth.match is not None]
        if num_new + sum(match.num_free_taken for match in matches) > self.num_free_blocks:
            return False
        return all(num_new + sum(map(window.num_free_taken, matches)) <= window.num_free for window in self.windows)

    def allocate(self, sequence: Sequence, num_tokens: int) -> BlockPair | None:
        """Grow the block table to hold the first ``num_tokens`` tokens, which this step computes; publish full blocks.

        Returns:
            The block to copy and its destination, before the step writes, if the next slot is in a shared block.
        """
        if not sequence.block_table:
            sequence.cache_epoch = self.prefix_cache.epoch
        copy = None if sequence.is_single else self._unshare(sequence)
        table, size, num_held = sequence.block_table, self.block_size, len(sequence.block_table)
        missing = self.num_blocks_for(num_tokens) - num_held
        table.extend(block.block_id for block in self.prefix_cache.take_blocks(missing))
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
        table.extend(block.block_id for block in self.prefix_cache.take_blocks(missing))
        for window in self.windows:
            window.grow(sequence, num_held)
        return max(0, missing)

    def free_draft_blocks(self, sequence: Sequence, num_tokens: int | None = None) -> None:
        """Free the blocks that ``extend`` added and that hold none of the sequence's first ``num_tokens`` tokens.

        Args:
            num_tokens: None: the computed ones.
        """
        num_tokens = sequence.num_computed_tokens if num_tokens is None else num_tokens
        table, num_kept = sequence.block_table, self.num_blocks_for(num_tokens)
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
        child.cache_epoch, child.num_chained_tokens = parent.cache_epoch, parent.num_chained_tokens
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
            self.release_swapped(sequence)
        elif self.enable_prefix_caching:
            self.prefix_cache.publish(sequence, sequence.num_computed_tokens)
        if self.states is not None:
            leave_snapshot(sequence, self.states, self.prefix_cache, self.pool)
        if sequence.block_table:
            for window in self.windows:
                window.release(sequence)
        release, blocks = self.pool.release, self.pool.blocks
        for block_id in reversed(sequence.block_table):
            release(blocks[block_id])
        if retention := sequence.group.request.retention:
            self._retain_longer(sequence.block_table, retention)
        sequence.block_table = []
        sequence.content_ids = []
        sequence.num_matched_tokens = 0
        sequence.num_computed_tokens = 0
        sequence.next_block_boundary = 0

    def _retain_longer(self, block_ids: GenericSequence[int], retention: int) -> None:
        """Mark blocks, and what hangs on them, as worth keeping; those that are not published stay as they are."""
        for block_id in block_ids:
            self.pool.retain_longer(self.pool.blocks[block_id], retention)
            for attached in self.attached:
                attached.retain_longer(block_id, retention)

    def release_swapped(self, sequence: Sequence) -> None:
        """Release what a swapped sequence has on the host."""
        self.host_pool.release(sequence.host_table)
        for window, host_ids in zip(self.windows, sequence.host_pages, strict=True):
            window.attached.store.release(host_ids)
        if self.states is not None:
            self.states.snapshots.store.release([sequence.host_slot])
        sequence.host_table, sequence.host_pages, sequence.host_slot = [], [], -1

    def _unshare(self, sequence: Sequence) -> BlockPair | None:
        """Replace the block that the sequence writes next by a copy, if other sequences use that block too."""
        index = first_written(sequence, self.block_size)
        if index >= len(sequence.block_table):
            return None
        shared = self.pool.blocks[sequence.block_table[index]]
        if shared.ref_count == 1:
            return None
        own = self.prefix_cache.take_blocks(1)[0]
        for window in self.windows:
            window.copy(shared.block_id, own.block_id)
        self.pool.release(shared)
        sequence.block_table = [*sequence.block_table[:index], own.block_id, *sequence.block_table[index + 1 :]]
        return shared.block_id, own.block_id

    # --- invariants ---------------------------------------------------------------------------------------------

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Assert the invariants, given every sequence that may have blocks. For tests: it visits the whole pool."""
        self.pool.check_integrity(Counter(block_id for sequence in sequences for block_id in sequence.block_table))
        self.prefix_cache.check_integrity()
        self.host_pool.check_integrity(Counter(host_id for sequence in sequences for host_id in sequence.host_table))
        held = [block.block_id for block in self.pool.blocks if block.ref_count or block.block_hash is not None]
        for window in self.windows:
            window.check_integrity(sequences, held)
        if self.states is not None:
            self.states.check_integrity(sequences, held)
        for store in (attached.store for attached in self.attached):
            for block_hash in store.by_name:
                assert self.prefix_cache.is_cached(block_hash), "the host keeps a page of a block that is lost"
        for sequence in sequences:
            assert not (sequence.block_table and sequence.host_table), f"{sequence.request_id} is in both pools"
