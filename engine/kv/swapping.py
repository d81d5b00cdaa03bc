"""Swapping: a preempted sequence moves to the host pools, with its pages of windows and its state, and comes back.

Whatever its blocks share with those of other sequences of its request stays shared there. What belongs to a published
block can be hit on the host too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as GenericSequence

from engine.kv.block_manager import BlockManager
from engine.kv.block_pool import Block
from engine.kv.growth import first_written
from engine.kv.host.host_pool import HostPool
from engine.sequence import Sequence

__all__ = ["can_swap_out", "num_blocks_to_swap_in", "swap_in", "swap_out"]


def can_swap_out(manager: BlockManager, sequences: Collection[Sequence]) -> bool:
    """Whether these sequences have blocks, and the host pools have room for all that they hold."""
    num_blocks = len({block_id for sequence in sequences for block_id in sequence.block_table})
    if not 0 < num_blocks <= manager.host_pool.num_free:
        return False
    for window in manager.windows:
        held = {block_id for sequence in sequences for block_id in window.held_blocks(sequence)}
        if len(held) > window.attached.store.num_free:
            return False
    num_states = sum(sequence.state_slot >= 0 for sequence in sequences)
    return manager.states is None or num_states <= manager.states.snapshots.store.num_free


def swap_out(manager: BlockManager, sequences: Collection[Sequence]) -> None:
    """Move what these sequences hold to the host pools; they have room for it."""
    if manager.enable_prefix_caching:  # so that the host pools know the names of full blocks
        for sequence in sequences:
            manager.prefix_cache.publish(sequence, sequence.num_computed_tokens)
    blocks = _HostCopies(manager.host_pool, manager.pool.blocks)
    pages = [_HostCopies(window.attached.store, manager.pool.blocks) for window in manager.windows]
    kept = []
    for sequence in sequences:
        host_table = [blocks.keep(block_id, block_id) for block_id in sequence.block_table]
        host_pages = [
            [
                copies.keep(block_id, window.attached.by_block[block_id].block_id)
                for block_id in window.held_blocks(sequence)
            ]
            for window, copies in zip(manager.windows, pages, strict=True)
        ]
        host_slot = -1
        if manager.states is not None and sequence.state_slot >= 0:
            host_slot = manager.states.swap_out(sequence)
        kept.append((host_table, host_pages, host_slot))
    for sequence, on_host in zip(sequences, kept, strict=True):
        num_computed = sequence.num_computed_tokens
        manager.free(sequence)
        if on_host[0]:
            sequence.num_computed_tokens = num_computed
            sequence.host_table, sequence.host_pages, sequence.host_slot = on_host


def num_blocks_to_swap_in(manager: BlockManager, sequences: Collection[Sequence]) -> int:
    """Return how many free blocks these sequences need to be swapped in and compute their remaining tokens."""
    users = Counter(host_id for sequence in sequences for host_id in sequence.host_table)
    needed = len(users)
    writers: Counter[int] = Counter()
    for sequence in sequences:
        held = len(sequence.host_table)
        if held:  # a sequence without host blocks starts in a later step
            needed += max(0, manager.num_blocks_for(sequence.num_tokens) - held)
        if (index := first_written(sequence, manager.block_size)) < held:
            writers[sequence.host_table[index]] += 1
    return needed + sum(min(count, users[host_id] - 1) for host_id, count in writers.items())


def swap_in(manager: BlockManager, sequences: Collection[Sequence]) -> None:
    """Move swapped-out sequences back to the device, into other blocks."""
    block_ids: dict[int, int] = {}  # by host id
    for sequence in sequences:
        if not sequence.host_table:
            continue
        sequence.block_table = [_bring_back(manager, host_id, block_ids) for host_id in sequence.host_table]
        for window, host_ids in zip(manager.windows, sequence.host_pages, strict=True):
            window.swap_in(sequence, host_ids)
        if manager.states is not None:
            manager.states.swap_in(sequence)
        # The content is the same, but in other blocks than those that were published.
        if manager.enable_prefix_caching:
            manager.prefix_cache.publish(sequence, sequence.num_computed_tokens)
    for sequence in sequences:
        if sequence.host_table:
            manager.release_swapped(sequence)


def _bring_back(manager: BlockManager, host_id: int, block_ids: dict[int, int]) -> int:
    """Return the block of the device for a block on the host, which is loaded in this step; it has one more user."""
    if host_id in block_ids:
        manager.pool.retain(manager.pool.blocks[block_ids[host_id]])
    else:
        block_ids[host_id] = manager.prefix_cache.take_blocks(1)[0].block_id
        manager.host_pool.bring_back(host_id, block_ids[host_id])
    return block_ids[host_id]


class _HostCopies:
    """The pages in one host pool to which those of some sequences are copied, by the block that each belongs to."""

    def __init__(self, host: HostPool, blocks: GenericSequence[Block]) -> None:
        self._host, self._blocks = host, blocks
        self._host_ids: dict[int, int] = {}

    def keep(self, block_id: int, page_id: int) -> int:
        """Return the host page for a page of the device, which belongs to a block; it has one more user."""
        if block_id in self._host_ids:
            self._host.pin(self._host.pages.blocks[self._host_ids[block_id]])
        else:
            self._host_ids[block_id] = self._host.keep(self._blocks[block_id], page_id).block_id
        return self._host_ids[block_id]
