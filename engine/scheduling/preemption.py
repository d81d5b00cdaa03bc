"""Preemption: which running request returns to the waiting queue when blocks run out, and what becomes of its blocks.

The request of the lowest priority, then the latest arrival, is preempted first. Its blocks are swapped to the host pool
if they all fit there. Otherwise they are freed, and its tokens are computed again; full blocks stay in the prefix cache
until they are evicted.
"""

from __future__ import annotations

from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.step_builder import StepBuilder
from engine.sequence import Sequence, SequenceGroup, SequenceStatus

__all__ = ["Preemption"]

# How often a request that runs alone may be preempted without progress before it loses one of its answers. Once is
# normal when the prefix cache was reset in between.
MAX_STALLS = 8


class Preemption:
    """Makes room in the pool of one engine."""

    def __init__(self, queues: RequestQueues) -> None:
        self._queues = queues
        self._blocks = queues.block_manager

    def make_room(self, num_blocks: int, group: SequenceGroup, step: StepBuilder) -> bool:
        """Preempt until ``num_blocks`` blocks are free; False if ``group`` itself had to be preempted."""
        while num_blocks > self._blocks.num_free_blocks:
            if not self.preempt_for(group, step):
                return False
        return True

    def preempt_for(self, group: SequenceGroup, step: StepBuilder) -> bool:
        """Preempt the request of the lowest priority; False if that is ``group`` itself."""
        return self.preempt_last(step) is not group

    def preempt_last(self, step: StepBuilder) -> SequenceGroup:
        """Move the last running group to the waiting queue, with its blocks on the host or without blocks."""
        members = self._queues.pop_last()
        group = members[0].group
        if not self._queues.running and self._is_stuck(group):
            members = self._drop(members, step)
        if self._blocks.can_swap_out(members):
            step.output.swap_out += self._blocks.swap_out(members)
            self._set_status(members, SequenceStatus.SWAPPED)
        else:
            for sequence in members:
                self._blocks.free(sequence)
            self._set_status(members, SequenceStatus.WAITING)
        group.num_preemptions += 1
        step.remove_preempted(group)
        if members:
            self._queues.add(group)
        return group

    @staticmethod
    def _set_status(members: list[Sequence], status: SequenceStatus) -> None:
        for sequence in members:
            sequence.status = status

    def _is_stuck(self, group: SequenceGroup) -> bool:
        """Count the preemption of a group that runs alone; True if it makes no progress, however often it starts.

        The engine accepts only requests that fit, on the condition that their answers share the blocks of the prompt.
        Colliding hashes can prevent that.
        """
        length = sum(sequence.num_tokens for sequence in group.unfinished)
        group.num_stalls = group.num_stalls + 1 if group.stalled_at == length else 1
        group.stalled_at = length
        return group.num_stalls > MAX_STALLS

    def _drop(self, members: list[Sequence], step: StepBuilder) -> list[Sequence]:
        """End the last sequence of a group, or all beams of a search, so that the others fit; return the others."""
        group = members[0].group
        num_kept = 0 if group.beams is not None else len(members) - 1
        dropped = members[num_kept:]
        for sequence in dropped:
            self._blocks.free(sequence)
            sequence.fail("the KV cache cannot hold all answers; ask for fewer")
        group.num_slots -= len(dropped)
        step.output.dropped += dropped[:1]
        return members[:num_kept]
