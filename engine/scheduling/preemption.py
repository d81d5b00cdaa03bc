"""Preemption: which running request returns to the waiting queue when blocks run out, and what becomes of its blocks.

The request of the lowest priority, then the latest turn, is preempted first. Its blocks are swapped to the host pool if
they all fit there. Otherwise they are freed, and its tokens are computed again; full blocks stay in the prefix cache
until they are evicted.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from engine.kv.swapping import can_swap_out, swap_out
from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.step_builder import StepBuilder
from engine.sequence import Sequence, SequenceGroup, SequenceStatus

__all__ = ["Preemption"]

# How often a request that runs alone may be preempted without having sampled a token in between; then it loses one of
# its answers. Once is normal after a reset of the prefix cache.
MAX_FUTILE_PREEMPTIONS = 8


class Preemption:
    """Makes room in the pool of one engine."""

    def __init__(self, queues: RequestQueues) -> None:
        self._queues = queues
        self._blocks = queues.block_manager
        # Of the groups that were preempted while they ran alone: their length then, and the preemptions at that length.
        self._futile: WeakKeyDictionary[SequenceGroup, tuple[int, int]] = WeakKeyDictionary()

    def make_room(self, num_blocks: int, group: SequenceGroup, step: StepBuilder) -> bool:
        """Preempt requests until ``num_blocks`` blocks can be allocated; False if ``group`` itself was preempted."""
        while num_blocks > self._blocks.num_growable_blocks:
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
        if can_swap_out(self._blocks, members):
            swap_out(self._blocks, members)
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

        The engine accepts only requests whose answers fit if they share the blocks of the prompt. Colliding hashes can
        prevent this sharing.
        """
        length = sum(sequence.num_tokens for sequence in group.unfinished)
        last_length, num_futile = self._futile.get(group, (length, 0))
        num_futile = num_futile + 1 if length == last_length else 1
        self._futile[group] = length, num_futile
        return num_futile > MAX_FUTILE_PREEMPTIONS

    def _drop(self, members: list[Sequence], step: StepBuilder) -> list[Sequence]:
        """End the last sequence of a group, or all beams of a search, so that the others fit; return the others."""
        group = members[0].group
        num_kept = 0 if group.beams is not None else len(members) - 1
        dropped = members[num_kept:]
        for sequence in dropped:
            self._blocks.free(sequence)
            sequence.fail("the KV cache cannot hold all answers; lower n, best_of or beam_width")
        group.num_slots -= len(dropped)
        step.output.dropped += dropped[:1]
        return members[:num_kept]
