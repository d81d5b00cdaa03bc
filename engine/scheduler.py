"""Scheduler: which sequences compute how many tokens in the next step, and who gives way when blocks run out.

Sequences are ranked by (priority, arrival). Running ones go first, then waiting ones as far as the budget, the places
and the blocks allow. At most ``min(max_num_seqs, max_num_batched_tokens)`` run at once and each of them is promised one
token of every step; what is left of the budget goes to prefill chunks by rank. So neither a long prompt nor a crowd of
decodes can starve the others. When a running sequence needs a block and none is free, the lowest-ranked one is
preempted: its blocks are freed (its full ones stay cached) and it is computed again later.

Continuous batching is Orca's (Yu et al., 2022), chunked prefill Sarathi-Serve's (Agrawal et al., 2024). This module
knows no tensors and no clock.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field

from engine.block_manager import BlockManager
from engine.sequence import FinishReason, Sequence, SequenceStatus

__all__ = ["ScheduledSequence", "Scheduler", "SchedulerOutput"]


@dataclass(slots=True)
class ScheduledSequence:
    """A sequence and the tokens of it that this step computes: ``num_new_tokens`` from ``start`` on."""

    sequence: Sequence
    start: int
    num_new_tokens: int

    @property
    def end(self) -> int:
        """Context length after the step."""
        return self.start + self.num_new_tokens

    @property
    def samples(self) -> bool:
        """Whether the step computes the last token, so that a new one is sampled."""
        return self.end == len(self.sequence.token_ids)


@dataclass(slots=True)
class SchedulerOutput:
    """One step's batch."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # left the queue in this step
    preempted: list[Sequence] = field(default_factory=list)
    num_blocks_due: int = 0  # blocks that the scheduled sequences still need for their known tokens and the next one

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(item.num_new_tokens for item in self.scheduled)

    @property
    def sampling(self) -> list[Sequence]:
        """The sequences that get a new token, in batch order."""
        return [item.sequence for item in self.scheduled if item.samples]


class Scheduler:
    """Keeps the queue and the batch of one engine.

    Args:
        block_manager: the pool that scheduled sequences draw on.
        max_num_seqs: sequences in one step, at most.
        max_num_batched_tokens: tokens in one step, at most.
    """

    def __init__(self, block_manager: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_running = min(max_num_seqs, max_num_batched_tokens)
        self.waiting: list[Sequence] = []  # by rank, the next one last
        self.running: list[Sequence] = []  # by rank, the first one first

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that fits the pool (the engine has checked that it does)."""
        sequence.status = SequenceStatus.WAITING
        insort(self.waiting, sequence, key=lambda other: (other.priority, -other.arrival))

    def abort(self, sequence: Sequence, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a sequence between two steps and free its blocks."""
        queue = self.running if sequence.status is SequenceStatus.RUNNING else self.waiting
        queue.remove(sequence)
        self.block_manager.free(sequence)
        sequence.finish(reason)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's batch and allocate its blocks; empty if nothing is unfinished."""
        output = SchedulerOutput()
        budget = self._schedule_running(output)
        if not output.preempted:  # else blocks are short already
            self._admit(output, budget)
        assert output.scheduled or not self.has_unfinished, "nothing can run: add() let in what cannot fit"
        return output

    def update(self, output: SchedulerOutput, token_ids: Sequence_[int]) -> list[Sequence]:
        """Record a computed step and the tokens it sampled (in the order of ``output.sampling``).

        Returns:
            The sequences that got a token, the finished ones with their blocks freed.
        """
        sampled = output.sampling
        for item in output.scheduled:
            item.sequence.num_computed_tokens = item.end
            item.sequence.num_kv_tokens = max(item.sequence.num_kv_tokens, item.end)
        assert len(sampled) == len(token_ids)
        for sequence, token_id in zip(sampled, token_ids, strict=True):
            sequence.append_token(token_id)
            if sequence.is_finished:
                self.block_manager.free(sequence)
        if any(sequence.is_finished for sequence in sampled):
            self.running = [sequence for sequence in self.running if not sequence.is_finished]
        return sampled

    # --- running ------------------------------------------------------------------------------------------------

    def _schedule_running(self, output: SchedulerOutput) -> int:
        """Schedule the running sequences by rank; return the tokens left for others."""
        spare = self.max_num_batched_tokens - len(self.running)  # beyond one token for each
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            num_new = min(sequence.remaining_tokens, 1 + spare)
            if not self._make_room(sequence, sequence.num_computed_tokens + num_new, output):
                break  # it was the last one, and has been preempted itself
            self._schedule(sequence, num_new, output)
            spare -= num_new - 1
            index += 1
        return spare

    def _make_room(self, sequence: Sequence, num_tokens: int, output: SchedulerOutput) -> bool:
        """Preempt from the lowest rank up until the sequence can grow; False if it had to go itself."""
        while not self.block_manager.can_allocate(sequence, num_tokens):
            victim = self.running.pop()
            self._preempt(victim)
            output.preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.block_manager.free(sequence)
        sequence.num_preemptions += 1
        self.add(sequence)

    def _schedule(self, sequence: Sequence, num_new: int, output: SchedulerOutput) -> None:
        start = sequence.num_computed_tokens
        self.block_manager.allocate(sequence, start + num_new)
        output.scheduled.append(ScheduledSequence(sequence, start, num_new))
        known = max(sequence.num_tokens, start + num_new + 1)
        output.num_blocks_due += self.block_manager.num_blocks_for(known) - len(sequence.block_table)

    # --- waiting ------------------------------------------------------------------------------------------------

    def _admit(self, output: SchedulerOutput, budget: int) -> None:
        """Start waiting sequences in order of rank while tokens, places and blocks last."""
        blocks = self.block_manager
        while self.waiting and budget > 0 and len(self.running) < self.max_num_running:
            sequence = self.waiting[-1]
            if self.running and output.num_blocks_due >= blocks.num_free_blocks:
                return  # spares the look-up below in every step of a long wait
            match = blocks.match_prefix(sequence)
            # Room for all its known tokens, not for a first chunk only: else prefills begin that must give way again.
            needed = blocks.num_blocks_for(sequence.num_tokens) - len(match.blocks) + match.num_evictable
            if needed + output.num_blocks_due > blocks.num_free_blocks:
                return
            self.waiting.pop()
            blocks.take_prefix(sequence, match)
            num_new = min(sequence.remaining_tokens, budget)
            if not sequence.num_preemptions:
                sequence.num_cached_tokens = sequence.num_computed_tokens
            sequence.status = SequenceStatus.RUNNING
            insort(self.running, sequence, key=lambda other: other.rank)
            output.admitted.append(sequence)
            self._schedule(sequence, num_new, output)
            budget -= num_new
