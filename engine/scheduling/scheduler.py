"""Scheduler: which sequences compute how many tokens in the next step, and which are preempted when blocks run out.

Requests are ordered by (priority, turn, arrival); the turns of one client are in the order of their arrival. Running
ones are scheduled first, then waiting ones as far as the token budget, the slots of the batch and the blocks allow. At
most ``min(max_num_seqs, max_num_batched_tokens)`` sequences run at once. Every step reserves one token for each of
them, and prefill chunks get the rest of the budget in order of priority. So neither a long prompt nor many decodes
starve the others. When a running sequence needs a block and none is free, the request of the lowest priority is
preempted (preemption.py).

The sequences of a request run, are preempted and resume together. After a recomputation they start one after the other
(group_plan.py). Draft tokens may use the tokens and blocks that are left at the end (drafter.py).

A step may be scheduled while the one before is in flight: launched, and its sampled tokens not known. ``launch`` counts
what a step computes, and each token that it samples as pending; the next step computes the pending tokens, which the
device has. A sequence skips the next step if the host must know its pending token first, or if that token is its last.
Whatever ends while a step is in flight is freed at once: the device works in the order of the launches, so a later step
cannot overwrite blocks that this one reads. ``collect`` drops what the step samples for it. No request is preempted
while a step is in flight: a sequence without a block waits until the step is collected, which may free blocks.

Continuous batching is Orca's (Yu et al., 2022), chunked prefill Sarathi-Serve's (Agrawal et al., 2024). This module
knows no tensors and no clock.
"""

from __future__ import annotations

from engine.kv.block_manager import BlockManager
from engine.outputs import FinishReason
from engine.scheduling.admission import Admission
from engine.scheduling.beams import advance_searches, fail_searches
from engine.scheduling.drafting.drafter import Drafter
from engine.scheduling.group_plan import plan_group
from engine.scheduling.preemption import Preemption
from engine.scheduling.prefill_pace import PrefillPace
from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.sampled_results import apply_sampled
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput, StepTimes
from engine.scheduling.step_builder import StepBuilder
from engine.sequence import Sequence, SequenceGroup, SequenceStatus

__all__ = ["Scheduler"]


class Scheduler:
    """Keeps the waiting queue and the running batch of one engine.

    Args:
        block_manager: allocates the blocks of scheduled sequences.
        max_num_seqs: sequences in one step, at most.
        max_num_batched_tokens: tokens in one step, at most.
        long_prefill_threshold: tokens of one sequence in one step, at most; 0 sets no such limit.
        pace: limits prefills beside decodes; None sets no such limit.
        drafter: adds draft tokens to the batches; None adds none.

    Attributes:
        waiting: the waiting requests; the one that starts next is the last.
        running: the sequences of the batch, the highest priority first, those of a request side by side.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_prefill_threshold: int = 0,
        pace: PrefillPace | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_running = min(max_num_seqs, max_num_batched_tokens)
        if block_manager.states is not None:
            self.max_num_running = min(self.max_num_running, block_manager.states.max_used)
        self.drafter = drafter
        self.queues = RequestQueues(block_manager, self.max_num_running)
        self.waiting = self.queues.waiting
        self.running = self.queues.running
        self._chunk_limit = long_prefill_threshold or max_num_batched_tokens
        self._pace = pace
        self._preemption = Preemption(self.queues)
        self._admission = Admission(self.queues)
        self._needs_scheduling: list[Sequence] = []  # see _sequences_to_schedule
        # Whether running sequences were left out of the last step, or compute more than a token in the next one.
        self._has_idle = False
        self._in_flight = False  # whether a step was launched and is not collected
        self._any_awaits_token = False

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    # --- requests -----------------------------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> None:
        """Queue a request. The engine has checked that it fits the pool."""
        self.queues.add(group)

    def abort(self, group: SequenceGroup, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request and free its blocks. Call it between steps."""
        for sequence in group.unfinished:
            self.end_sequence(sequence, reason)

    def end_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one sequence; its request continues if it has others. Call it between steps."""
        if sequence.status is SequenceStatus.RUNNING:
            self.queues.end_running(sequence)
        else:
            self.queues.end_waiting(sequence)
        sequence.finish(reason)
        self._forget_ended()

    # --- a step -------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's batch and allocate its blocks; empty if nothing is unfinished."""
        # A sequence whose drafts are in flight may have to compute its last token again.
        settled = (
            [member for member in self.running if not member.awaits_token] if self._any_awaits_token else self.running
        )
        self.block_manager.slide(settled)
        max_step_tokens = self._max_step_tokens()
        step = StepBuilder(self.queues, max_step_tokens, self._chunk_limit)
        if self._any_awaits_token:
            for index, sequence in enumerate(self.running):
                if sequence.awaits_token:
                    step.leave_idle(index)
        self._schedule_running(step)
        blocks_ran_out = bool(step.output.preempted) or step.output.lacks_blocks
        if self.waiting and not blocks_ran_out:
            self._admission.start_waiting(step, self.max_num_batched_tokens - max_step_tokens)
        if self.drafter is not None and not blocks_ran_out:
            self.drafter.add_drafts(step)
        output = step.build()
        self._has_idle = len(output.sequences) < len(self.running)
        return output

    def update(self, output: SchedulerOutput, sampled: SampledTokens) -> list[Sequence]:
        """Update the sequences and queues after a step that was computed while no other one was in flight.

        Returns:
            The sequences that sampled a token or ended without one; the blocks of those that ended are freed. The first
            sequence of a beam search represents all its beams.
        """
        self._advance_computed(output)
        return self._apply(output, sampled)[0]

    def launch(self, output: SchedulerOutput) -> None:
        """Update the sequences and queues for a step in flight; the one before must have been collected."""
        self._advance_computed(output)
        self._in_flight = True
        cancelled = output.cancelled
        for sequence in output.sampling:
            if sequence in cancelled:
                continue
            sequence.num_pending = 1
            if self._must_know_token(sequence, output):
                sequence.awaits_token = self._any_awaits_token = True

    def collect(
        self, output: SchedulerOutput, sampled: SampledTokens, following: SchedulerOutput | None = None
    ) -> list[Sequence]:
        """Update the sequences and queues when the tokens of a step in flight are known.

        Args:
            output: the step.
            sampled: its tokens.
            following: the step that was scheduled meanwhile, and is to be launched.

        Returns:
            As ``update``.
        """
        self._in_flight = self._any_awaits_token = False
        for sequence in output.sampling:
            sequence.num_pending, sequence.awaits_token = 0, False
        _drop_wasted(output, sampled)
        resampled_on_host = [output.sampling[position] for position in sampled.resampled_on_host]
        updated, ended = self._apply(output, sampled)
        if following is not None:
            following.cancelled.update(ended, resampled_on_host)
        return updated

    def record_step(self, output: SchedulerOutput, times: StepTimes) -> None:
        """Take in how long a step took, for the limits on prefills beside decodes and on drafts."""
        if self._pace is not None:
            self._pace.record_step(output.num_tokens, times.total)
        if self.drafter is not None:
            self.drafter.record_step(output, times.total - times.draft)

    def _must_know_token(self, sequence: Sequence, output: SchedulerOutput) -> bool:
        """Whether the next step must not compute a sequence's pending token: it is the last, or the host needs it."""
        return (
            len(sequence.token_ids) + sequence.num_pending >= sequence.max_total_tokens
            or sequence.needs_known_tokens
            or (self.drafter is not None and (sequence in output.drafts or self.drafter.awaits_token(sequence)))
        )

    def _apply(self, output: SchedulerOutput, sampled: SampledTokens) -> tuple[list[Sequence], list[Sequence]]:
        """Append what a step has sampled; return the sequences with a new token or an end, and those that ended."""
        if sampled.failed and sampled.beams:
            fail_searches(output.sampling, sampled)
        ended = apply_sampled(output.sampling, sampled)
        if self.drafter is not None and output.drafts:
            ended += self.drafter.accept(output, sampled)
            self._has_idle |= self.block_manager.states is not None  # some may have to be scheduled like prefills
        for sequence in ended:
            self.queues.end_running(sequence)
        updated = output.sampling
        if sampled.beams:
            updated = advance_searches(output.sampling, sampled.beams, self.queues)
        self._forget_ended()
        return (updated + output.dropped if output.dropped else updated), ended

    # --- running sequences --------------------------------------------------------------------------------------

    def _max_step_tokens(self) -> int:
        """Return the token limit of the next step: lower than the budget if prefills would slow decodes down."""
        budget, num_running = self.max_num_batched_tokens, len(self.running)
        if self._pace is None:
            return budget
        num_decodes = sum(len(member.token_ids) - member.num_computed_tokens <= 1 for member in self.running)
        if not num_decodes:
            return budget
        could_start = min(len(self.waiting), self.queues.num_free_slots)
        paced = self._pace.step_tokens(num_decodes, num_running - num_decodes + could_start)
        return min(budget, max(paced, self.queues.num_used_slots + 1))

    def _schedule_running(self, step: StepBuilder) -> None:
        """Schedule the running sequences, the highest priority first.

        Most decode within their last block. They need nothing here: StepBuilder has reserved one token for each.
        """
        planned = None
        for sequence in self._sequences_to_schedule():
            group = sequence.group
            if group is planned or sequence.status is not SequenceStatus.RUNNING:  # ended or preempted meanwhile
                continue
            num_tokens = sequence.num_tokens
            if sequence.is_single and num_tokens == sequence.num_computed_tokens + 1:
                if not sequence.awaits_token:
                    self._schedule_decode(sequence, step)
            else:
                planned = group
                self._schedule_group(sequence, step)

    def _schedule_decode(self, sequence: Sequence, step: StepBuilder) -> None:
        """Allocate the block of a sequence's last token if it is the first in it, unless the sequence is preempted."""
        blocks, num_tokens = self.block_manager, sequence.num_tokens
        num_lacking = int(num_tokens > len(sequence.block_table) * blocks.block_size)
        if self._in_flight and num_lacking > blocks.num_growable_blocks:
            self._wait_for_blocks([sequence], step)
        elif not num_lacking or self._preemption.make_room(num_lacking, sequence.group, step):
            blocks.allocate(sequence, num_tokens)

    def _wait_for_blocks(self, members: list[Sequence], step: StepBuilder) -> None:
        """Leave the sequences of a group out of a step, because only the end of the step in flight can make room."""
        first = self.running.index(members[0])
        for index in range(first, first + len(members)):
            step.leave_idle(index)
        step.output.lacks_blocks = True

    def _schedule_group(self, first: Sequence, step: StepBuilder) -> None:
        """Schedule the sequences of the group whose first sequence is ``first``, unless the group is preempted.

        Preempting another group can change which blocks match, so the plan is made again afterwards.
        """
        group, blocks = first.group, self.block_manager
        members = [first] if first.is_single else [member for member in self.running if member.group is group]
        growths = plan_group(members, step.max_chunk(), blocks)
        while not blocks.can_grow(growths):
            if self._in_flight:
                self._wait_for_blocks(members, step)
                return
            if not self._preemption.preempt_for(group, step):
                return
            growths = plan_group(members, step.max_chunk(), blocks)
        step.compute(growths, self.running.index(members[0]))

    def _sequences_to_schedule(self) -> list[Sequence]:
        """Return the running sequences that need blocks or a plan, the highest priority first.

        ``_advance_computed`` collects them. With groups of several sequences the list is rebuilt, because forks and
        beams change the batch too, and so it is after a step that left sequences out.
        """
        if self.queues.may_have_groups or self._has_idle:
            self._needs_scheduling = [
                sequence for sequence in self.running if sequence.num_computed_tokens >= sequence.next_block_boundary
            ]
            self.queues.may_have_groups = any(not sequence.is_single for sequence in self.running)
        return self._needs_scheduling

    def _advance_computed(self, output: SchedulerOutput) -> None:
        """Count the tokens of a step as computed, but draft tokens; collect who needs scheduling in the next step."""
        self._needs_scheduling = needs_scheduling = []
        cancelled = output.cancelled
        for sequence, num_new in zip(output.sequences, output.num_new_tokens, strict=True):
            if sequence in cancelled:
                continue
            sequence.num_computed_tokens = num_computed = sequence.num_computed_tokens + num_new
            if num_computed >= sequence.next_block_boundary:
                needs_scheduling.append(sequence)
        for sequence, draft in output.drafts.items():
            sequence.num_computed_tokens -= len(draft)
        for fork in output.forks:
            self.queues.add_fork(fork.group.sequences[0], fork)

    def _forget_ended(self) -> None:
        """Release references to ended requests, which would stay in memory while the engine is idle."""
        if not self.running:
            self._needs_scheduling = []
        if not self.waiting:
            self._admission.forget()


def _drop_wasted(output: SchedulerOutput, sampled: SampledTokens) -> None:
    """Drop samples of sequences that ended meanwhile or computed a wrong pending token."""
    cancelled, finished = output.cancelled, SequenceStatus.FINISHED
    kept = [
        position
        for position, sequence in enumerate(output.sampling)
        if not (sequence.status is finished or sequence in cancelled)
    ]
    output.num_wasted = len(output.sampling) - len(kept)
    if output.num_wasted:
        output.sampling = [output.sampling[position] for position in kept]
        sampled.keep(kept)
