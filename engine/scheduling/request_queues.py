"""RequestQueues: the waiting queue and the running batch of one engine.

Both are ordered by (priority, turn, arrival). The sequences of a request run, are preempted and resume together. A
running request has one slot of the batch for each of its sequences, also for those that fork later.
"""

from __future__ import annotations

from bisect import insort
from contextlib import suppress

from engine.kv.block_manager import BlockManager
from engine.scheduling.client_turns import ClientTurns
from engine.sequence import Sequence, SequenceGroup, SequenceStatus

__all__ = ["RequestQueues"]


class RequestQueues:
    """Moves requests between the waiting queue and the running batch.

    Args:
        block_manager: frees the blocks of sequences that end.
        max_num_running: slots of the batch, which is the maximum number of sequences that run at once.
    """

    def __init__(self, block_manager: BlockManager, max_num_running: int) -> None:
        self.block_manager = block_manager
        self.max_num_running = max_num_running
        self.waiting: list[SequenceGroup] = []  # the request that starts next is the last element
        self.running: list[Sequence] = []  # highest priority first; the sequences of a group are adjacent
        self.num_swapped = 0  # waiting groups whose blocks are in the host pool
        self._turns = ClientTurns()
        self.num_used_slots = 0  # of the running groups, their future forks included
        self.may_have_groups = False  # whether groups of several sequences may be running

    @property
    def num_free_slots(self) -> int:
        """Slots that no running request has."""
        return self.max_num_running - self.num_used_slots

    def add(self, group: SequenceGroup) -> None:
        """Queue a group that is new or was preempted."""
        self._turns.join(group)
        insort(self.waiting, group, key=lambda other: (other.priority, -other.turn, -other.arrival))
        self.num_swapped += group.status is SequenceStatus.SWAPPED

    def start(self, group: SequenceGroup) -> int:
        """Move the next waiting group to the batch; return the index of its first sequence there."""
        assert self.waiting[-1] is group
        self.waiting.pop()
        self._turns.leave(group, starts=True)
        self.num_swapped -= group.status is SequenceStatus.SWAPPED
        index = len(self.running)
        while index and self.running[index - 1].group.priority_key > group.priority_key:
            index -= 1
        members = group.unfinished
        self.running[index:index] = members
        for sequence in members:
            sequence.status = SequenceStatus.RUNNING
        self.num_used_slots += group.num_slots
        self.may_have_groups |= not members[0].is_single
        return index

    def add_fork(self, parent: Sequence, child: Sequence) -> None:
        """Add a forked sequence to the batch; it shares the blocks of its parent."""
        self.block_manager.fork(parent, child)
        insort(self.running, child, key=lambda other: other.priority_key)

    def pop_last(self) -> list[Sequence]:
        """Remove the running group of the lowest priority from the batch; return its sequences, in order."""
        group = self.running[-1].group
        first = len(self.running)
        while first and self.running[first - 1].group is group:
            first -= 1
        members = self.running[first:]
        del self.running[first:]
        self.num_used_slots -= group.num_slots
        return members

    def end_running(self, sequence: Sequence) -> None:
        """Remove a sequence from the batch and free its blocks and its slot."""
        group = sequence.group
        if not sequence.is_single:
            group.record_sharing()
        with suppress(ValueError):  # a fork of a step that failed has not joined the batch
            self.running.remove(sequence)
        self.block_manager.free(sequence)
        if group.beams is not None:  # keeps its slots to the end, as its beams may become fewer and more again
            num_slots = 0 if any(other.group is group for other in self.running) else group.num_slots
        else:
            num_slots = 1 if group.is_forked else group.num_slots
        self.num_used_slots -= num_slots
        group.num_slots -= num_slots

    def end_waiting(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that waits; its group leaves the queue with its last sequence."""
        group = sequence.group
        if len(group.unfinished) == 1:
            self.waiting.remove(group)
            self._turns.leave(group, starts=False)
            self.num_swapped -= sequence.status is SequenceStatus.SWAPPED
        elif group.is_forked and group.beams is None:
            group.num_slots -= 1
        self.block_manager.free(sequence)
