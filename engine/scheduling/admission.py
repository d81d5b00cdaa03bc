"""Admission: which waiting requests start in a step.

They start in order of priority, turn and arrival, while tokens, slots and blocks last. A request starts only if the
pool has room for all its known tokens. With room for its first chunk alone, it would soon be preempted again.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.kv.block_manager import BlockManager
from engine.kv.growth import Growth
from engine.kv.pool_sizes import pages_in_reach
from engine.kv.swapping import num_blocks_to_swap_in, swap_in
from engine.scheduling.group_plan import plan_group
from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.step_builder import StepBuilder
from engine.sequence import SequenceGroup, SequenceStatus

__all__ = ["Admission"]

# Share of the pool that stays free when a request starts, for the running ones to grow into, as in vLLM. Without it a
# full pool holds 0.4% more tokens and preempts 60% more often (benchmarks/kv_utilization.py).
WATERMARK = 0.01


class _Blocked(NamedTuple):
    """A waiting group that the pool had no room for, and what must change before it is checked again."""

    group: SequenceGroup
    num_released: int  # of the pool at that time
    awaited_hash: int | None  # of the block whose publication would reduce what the group needs
    content_id: int | None  # of the other content that had this hash then; None: nothing had it


class Admission:
    """Starts the waiting requests of one engine."""

    def __init__(self, queues: RequestQueues) -> None:
        self._queues = queues
        self._blocks = queues.block_manager
        self._watermark = int(WATERMARK * len(queues.block_manager.pool.blocks))
        self._blocked: _Blocked | None = None

    def start_waiting(self, step: StepBuilder, withheld_tokens: int) -> None:
        """Start waiting groups while tokens, slots and blocks last.

        Args:
            step: the step that they join.
            withheld_tokens: tokens by which PrefillPace lowered the budget. They count when the method checks that each
                sequence of the group gets a token. Otherwise a request with a large ``n`` might never start.
        """
        blocks, reserve = self._blocks, _BlockReserve(step)
        while self._queues.waiting and step.token_budget >= 1:
            group = self._queues.waiting[-1]
            num_slots = min(step.token_budget + withheld_tokens, self._queues.num_free_slots)
            max_chunk = step.max_chunk(group.num_slots)
            if group.num_slots > num_slots or not self._fits(group, max_chunk, reserve):
                return
            if group.status is SequenceStatus.SWAPPED:
                swap_in(blocks, group.unfinished)
            growths = plan_group(group.unfinished, max_chunk, blocks)
            if not blocks.can_grow(growths):
                # Colliding hashes made blocks_to_start() too small. A waiting group waits until it runs alone: then its
                # first sequence fits. Of a swapped one only the sequences that were swapped run in this step.
                if group.status is SequenceStatus.WAITING:
                    assert self._queues.running, "add() accepted a request that cannot fit"
                    self._block(group)
                    return
                growths = _without_starts(growths)
            reserve.add(step.start(group, growths))

    def forget(self) -> None:
        """Release the blocked group, which may have ended."""
        self._blocked = None

    def _fits(self, group: SequenceGroup, max_chunk: int, reserve: _BlockReserve) -> bool:
        """Whether the pools have room for all known tokens of a group; they always have if no other request runs."""
        if not self._queues.running:
            return True
        # The pages of windows first: they change in each step, and need no match of the group's prefix.
        if not self._has_pages(group, max_chunk) or self._is_still_blocked(group):
            return False
        if reserve.fits(blocks_to_start(group, self._blocks) + self._watermark, self._blocks.num_free_blocks):
            return True
        self._block(group)
        return False

    def _has_pages(self, group: SequenceGroup, max_chunk: int) -> bool:
        """Whether each window has pages for a group: for what its next tokens reach and for a chunk of its first one.

        A page for each running sequence is left too.
        """
        size = self._blocks.block_size
        for window in self._blocks.windows:
            most, needed = pages_in_reach(window.window, size), 0
            for member in group.unfinished:
                chunk_pages = 0 if needed else -(-(min(max_chunk, member.remaining_tokens) - 1) // size)
                needed += min(self._blocks.num_blocks_for(member.num_tokens), most + chunk_pages)
            reserve = len(self._queues.running) + int(WATERMARK * len(window.pages.blocks))
            if needed + reserve > window.num_free:
                return False
        return True

    def _block(self, group: SequenceGroup) -> None:
        """Remember that the pool of blocks has no room for a group."""
        awaited_hash = self._blocks.awaited_hash(group.unfinished[0])
        content_id = self._blocks.prefix_cache.content_under(awaited_hash)
        self._blocked = _Blocked(group, self._blocks.pool.num_released, awaited_hash, content_id)

    def _is_still_blocked(self, group: SequenceGroup) -> bool:
        """Whether the pool had no room for the group and nothing has changed since.

        This saves matching the group's prefix again in each step of a long wait.
        """
        blocked = self._blocked
        if blocked is None or blocked.group is not group or blocked.num_released != self._blocks.pool.num_released:
            return False
        return self._blocks.prefix_cache.content_under(blocked.awaited_hash) == blocked.content_id


class _BlockReserve:
    """The blocks that the batch of a step still needs: an upper bound, replaced by the exact number if it matters."""

    def __init__(self, step: StepBuilder) -> None:
        self._step = step
        self._num_blocks = step.max_blocks_needed()
        self._is_exact = False

    def fits(self, num_blocks: int, num_free: int) -> bool:
        """Whether ``num_blocks`` fit into the free blocks beside what the batch still needs."""
        if not self._is_exact and num_blocks + self._num_blocks > num_free:
            self._num_blocks = self._step.num_blocks_needed(range(len(self._step.running)))
            self._is_exact = True
        return num_blocks + self._num_blocks <= num_free

    def add(self, indices: range) -> None:
        """Reserve blocks for the sequences at these indices of the batch, which have just started."""
        self._num_blocks += self._step.num_blocks_needed(indices)


def _without_starts(growths: list[Growth]) -> list[Growth]:
    """Let the sequences of a group without blocks wait, and with them all beams of a search."""
    return [
        growth
        if growth.sequence.block_table and growth.sequence.group.beams is None
        else Growth(growth.sequence, growth.sequence.num_computed_tokens)
        for growth in growths
    ]


def blocks_to_start(group: SequenceGroup, block_manager: BlockManager) -> int:
    """Return how many free blocks all known tokens of a group need; blocks that its sequences share count once."""
    members, size = group.unfinished, block_manager.block_size
    if group.status is SequenceStatus.SWAPPED:
        return num_blocks_to_swap_in(block_manager, members)
    if len(members) == 1:
        match = block_manager.match_prefix(members[0])
        return block_manager.num_blocks_for(members[0].num_tokens) - match.num_blocks + match.num_free_taken
    if not block_manager.enable_prefix_caching:
        return sum(block_manager.num_blocks_for(member.num_tokens) for member in members)
    full = {member.block_hash(index, size) for member in members for index in range(member.num_tokens // size)}
    return len(full) + sum(member.num_tokens % size > 0 for member in members)
