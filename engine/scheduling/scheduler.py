"""Scheduler: which sequences compute how many tokens in the next step, and who gives way when blocks run out.

Requests are ranked by (priority, arrival). Running ones go first, then waiting ones as far as the budget, the places
and the blocks allow. At most ``min(max_num_seqs, max_num_batched_tokens)`` sequences run at once and each of them is
promised one token of every step; what is left of the budget goes to prefill chunks by rank. So neither a long prompt
nor a crowd of decodes can starve the others. When a running sequence needs a block and none is free, the lowest-ranked
request is preempted: its blocks are swapped to the host pool, or freed (the full ones stay cached) and computed again.

A request's sequences run, give way and come back together. After a recomputation they begin one after the other, so
that each finds in the prefix cache what it shares with the ones before; beams all wait until the last is there.

Tokens and blocks that are left when all that is done may go to drafts: see drafter.py.

Continuous batching is Orca's (Yu et al., 2022), chunked prefill Sarathi-Serve's (Agrawal et al., 2024). This module
knows no tensors and no clock.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Sequence_

from engine.beam_search import Candidates
from engine.kv.block_manager import BlockManager, Growth
from engine.kv.prefix_cache import PrefixMatch
from engine.outputs import FinishReason
from engine.scheduling.drafter import Drafter, Room
from engine.scheduling.prefill_pace import PrefillPace
from engine.scheduling.recording import append_tokens, fail_searches, record_logprobs
from engine.scheduling.step import SampledTokens, SchedulerOutput
from engine.sequence import Sequence, SequenceGroup, SequenceStatus

__all__ = ["Scheduler"]

# Share of the pool that stays free when a request is admitted, for those that run to grow into, as in vLLM. Without it
# a full pool holds 0.4% more tokens and preempts 60% more often (benchmarks/kv_utilization.py).
WATERMARK = 0.01
# How often a request may give way to nobody without coming further before it loses one of its answers. Once is normal
# when the prefix cache was reset in between.
MAX_STALLS = 8


class Scheduler:
    """Keeps the queue and the batch of one engine.

    Args:
        block_manager: the pool that scheduled sequences draw on.
        max_num_seqs: sequences in one step, at most.
        max_num_batched_tokens: tokens in one step, at most.
        long_prefill_threshold: tokens of one sequence in one step, at most; 0 sets no such limit.
        pace: limits prefills beside decodes; None sets no such limit.
        drafter: adds guessed tokens to the batches; None does without.
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
        self.drafter = drafter
        self.waiting: list[SequenceGroup] = []  # by rank, the next one last
        self.num_swapped = 0  # of those that wait
        self.running: list[Sequence] = []  # by rank, the first one first; a group's sequences together
        self._chunk_limit = long_prefill_threshold or max_num_batched_tokens
        self._pace = pace
        self._num_used_slots = 0  # that the running groups take
        self._due: list[Sequence] = []  # see _due_sequences
        self._has_groups = False  # whether groups of several sequences may run
        self._watermark = int(WATERMARK * len(block_manager.pool.blocks))
        # Who found no room, num_released then, and the block whose publication would lessen what is needed.
        self._refused: tuple[SequenceGroup, int, int | None] | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def num_free_slots(self) -> int:
        """Sequences that the batch has places for beside those in it."""
        return self.max_num_running - self._num_used_slots

    def add(self, group: SequenceGroup) -> None:
        """Queue a request that fits the pool (the engine has checked that it does)."""
        insort(self.waiting, group, key=lambda other: (other.priority, -other.arrival))

    def abort(self, group: SequenceGroup, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request between two steps and free its blocks."""
        for sequence in group.unfinished:
            self.end_sequence(sequence, reason)

    def end_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one sequence between two steps; its request goes on if others of it do."""
        group = sequence.group
        if sequence.status is SequenceStatus.RUNNING:
            self._leave(sequence)
        else:
            if len(group.unfinished) == 1:
                self.waiting.remove(group)
                self.num_swapped -= sequence.status is SequenceStatus.SWAPPED
            elif group.is_forked and group.beams is None:
                group.num_slots -= 1
            self.block_manager.free(sequence)
        sequence.finish(reason)
        self._forget_if_idle()

    # --- a step -------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's batch and allocate its blocks; empty if nothing is unfinished."""
        output = SchedulerOutput()
        counts = [1] * len(self.running)
        partial: set[int] = set()  # places in the batch of those that sample nothing yet
        step_tokens = self._step_tokens()
        spare = self._schedule_running(output, counts, partial, step_tokens - self._num_used_slots)
        if self.waiting and not output.preempted:  # else blocks are short already
            spare = self._admit(output, counts, partial, spare, self.max_num_batched_tokens - step_tokens)
        if self.drafter is not None and not output.preempted:
            self._draft(self.drafter, output, counts, partial, spare)
        self._fill(output, counts, partial)
        return output

    def _draft(
        self, drafter: Drafter, output: SchedulerOutput, counts: list[int], partial: set[int], spare: int
    ) -> None:
        """Add drafts where tokens and blocks are left that nobody in the batch needs in its next step either."""
        if spare > 0:
            reserved = self._most_blocks_due(counts, partial)
            room = Room(spare, self.block_manager.num_free_blocks - reserved, self._chunk_limit - 1)
            output.drafts = drafter.draft(self.running, counts, partial, room)

    def _fill(self, output: SchedulerOutput, counts: list[int], partial: set[int]) -> None:
        """Write the batch into ``output``, and fork the groups whose prompt is complete with this step."""
        output.sequences, output.num_new_tokens = self.running.copy(), counts
        output.sampling, output.logit_indices = output.sequences, range(len(counts))
        if len(self.running) < self._num_used_slots or 0 in counts:
            self._fill_with_forks(output, counts, partial)
        elif partial:
            sampling, rows = self.running.copy(), list(range(len(counts)))
            for place in sorted(partial, reverse=True):
                del sampling[place], rows[place]
            output.sampling, output.logit_indices = sampling, rows

    def _fill_with_forks(self, output: SchedulerOutput, counts: list[int], partial: set[int]) -> None:
        """The same where a group may fork, or some of its sequences have to wait for others."""
        rows: list[int] = []
        sampling: list[Sequence] = []
        row = 0
        for place, (sequence, count) in enumerate(zip(self.running, counts, strict=True)):
            if place not in partial:
                forks = [] if sequence.group.is_forked or sequence.group.beams else sequence.group.fork()
                output.forks += forks
                sampling += [sequence, *forks]
                rows += [row] * (1 + len(forks))
            row += count > 0
        output.sampling, output.logit_indices = sampling, rows
        if 0 in counts:
            output.sequences = [one for one, count in zip(self.running, counts, strict=True) if count]
            output.num_new_tokens = [count for count in counts if count]

    def update(self, output: SchedulerOutput, sampled: SampledTokens) -> list[Sequence]:
        """Record a computed step and what it sampled.

        Returns:
            The sequences that got a token or ended without one, the finished ones with their blocks freed; of a request
            that searches with beams, its first sequence stands for all.
        """
        self._due = []
        for sequence, count in zip(output.sequences, output.num_new_tokens, strict=True):
            sequence.num_computed_tokens = num_computed = sequence.num_computed_tokens + count
            if num_computed >= sequence.next_block_boundary:
                self._due.append(sequence)
        for sequence in output.forks:
            self.block_manager.fork(sequence.group.sequences[0], sequence)
            insort(self.running, sequence, key=lambda other: other.priority_key)
        for group, logprobs in sampled.prompt_logprobs:
            group.prompt_logprobs += logprobs
        if sampled.failed and sampled.beams:
            fail_searches(output.sampling, sampled)
        if sampled.logprobs is not None:
            record_logprobs(output.sampling, sampled)
        ended = append_tokens(output.sampling, sampled)
        if self.drafter is not None and output.drafts:
            ended += self.drafter.settle(output, sampled)
        for sequence in ended:
            self._leave(sequence)
        got_token = self._advance_beams(output.sampling, sampled.beams) if sampled.beams else output.sampling
        self._forget_if_idle()
        return got_token + output.dropped if output.dropped else got_token

    # --- running ------------------------------------------------------------------------------------------------

    def _schedule_running(self, output: SchedulerOutput, counts: list[int], partial: set[int], spare: int) -> int:
        """Schedule the running sequences by rank, with ``spare`` tokens beyond one for each; return what is left.

        Most sequences decode within their last block: for them the 1 that ``counts`` holds already is all.
        """
        running, blocks = self.running, self.block_manager
        planned: SequenceGroup | None = None
        for sequence in self._due_sequences():
            group = sequence.group
            if group is planned or sequence.status is not SequenceStatus.RUNNING:  # ended or preempted meanwhile
                continue
            num_tokens = len(sequence.token_ids)
            # Nearly always a decode whose last block is full, of a request for one answer: the short way.
            if sequence.is_single and num_tokens == sequence.num_computed_tokens + 1:
                needed = int(num_tokens > len(sequence.block_table) * blocks.block_size)
                if not needed or self._make_room(group, needed, output):
                    blocks.allocate(sequence, num_tokens)
                continue
            planned = group
            members = [sequence] if sequence.is_single else [one for one in running if one.group is group]
            growths = self._plan_with_room(members, spare, output)
            if growths is not None:
                first = running.index(members[0])
                places = range(first, first + len(members))
                spare = self._grow(growths, places, counts, partial, spare, output)
        del counts[len(running) :]
        return spare

    def _step_tokens(self) -> int:
        """Return the most tokens of the next step: the budget, or less so that prefills do not slow decodes down."""
        if self._pace is None:
            return self.max_num_batched_tokens
        num_decodes = sum(len(one.token_ids) - one.num_computed_tokens <= 1 for one in self.running)
        if not num_decodes:
            return self.max_num_batched_tokens
        could_start = min(len(self.waiting), self.max_num_running - self._num_used_slots)
        paced = self._pace.step_tokens(num_decodes, len(self.running) - num_decodes + could_start)
        if paced is None:
            return self.max_num_batched_tokens
        return min(self.max_num_batched_tokens, max(paced, self._num_used_slots + 1))

    def _due_sequences(self) -> list[Sequence]:
        """Return by rank the running sequences that the block manager, or a plan for a group, has something to do for.

        The last update has found them in passing, but for groups of several, which change otherwise too.
        """
        if self._has_groups:
            self._due = [one for one in self.running if one.num_computed_tokens >= one.next_block_boundary]
            self._has_groups = not all(one.is_single for one in self.running)
        return self._due

    def _plan(self, members: list[Sequence], spare: int) -> list[Growth]:
        """Return up to where each of a group's sequences computes in this step.

        At most one of them catches up on more than its last token. Beams need their logits in the same step: none of
        them computes its last token before all can.
        """
        behind = next((one for one in members if one.remaining_tokens > 1 or not one.block_table), None)
        if behind is None:
            return [Growth(one, one.num_tokens) for one in members]
        others_ready = all(one is behind or (one.remaining_tokens == 1 and one.block_table) for one in members)
        in_step = behind.group.beams is not None
        match = None if behind.block_table else self.block_manager.match_prefix(behind)
        start = min(match.num_tokens, behind.num_tokens - 1) if match is not None else behind.num_computed_tokens
        wanted = behind.num_tokens - start - (in_step and not others_ready)
        end = start + min(wanted, 1 + spare, self._chunk_limit)
        hold = in_step and end < behind.num_tokens
        growths = []
        for one in members:
            if one is behind:
                growths.append(Growth(one, end, match))
            else:
                ready = one.remaining_tokens == 1 and one.block_table and not hold
                growths.append(Growth(one, one.num_computed_tokens + bool(ready)))
        return growths

    def _plan_with_room(self, members: list[Sequence], spare: int, output: SchedulerOutput) -> list[Growth] | None:
        """Plan for a group's sequences what there are blocks for, preempting others; None if it had to go itself.

        Whoever is preempted frees blocks that were matched, or publishes its own in their place: each time the plan is
        made anew.
        """
        while True:
            growths = self._plan(members, spare)
            if self.block_manager.num_blocks_to_grow(growths) <= self.block_manager.num_free_blocks:
                return growths
            victim = self.running[-1].group
            self._preempt(victim, output)
            if victim is members[0].group:
                return None

    def _make_room(self, group: SequenceGroup, needed: int, output: SchedulerOutput) -> bool:
        """Preempt from the lowest rank up until the group gets its blocks; False if it had to go itself."""
        while needed > self.block_manager.num_free_blocks:
            victim = self.running[-1].group
            self._preempt(victim, output)
            if victim is group:
                return False
        return True

    def _grow(
        self,
        growths: list[Growth],
        places: Sequence_[int],
        counts: list[int],
        partial: set[int],
        spare: int,
        output: SchedulerOutput,
    ) -> int:
        """Allocate what was planned and enter it into the batch; return the tokens left for others."""
        for growth in growths:
            if growth.match is not None:  # before another one evicts what was matched
                self._begin(growth.sequence, growth.match)
        for place, growth in zip(places, growths, strict=True):
            sequence, end = growth.sequence, growth.end
            count = end - sequence.num_computed_tokens
            counts[place] = count
            if count and (copy := self.block_manager.allocate(sequence, end)):
                output.block_copies.append(copy)
            if end < sequence.num_tokens or not count:
                partial.add(place)
            spare -= max(count - 1, 0)
        return spare

    def _begin(self, sequence: Sequence, match: PrefixMatch) -> None:
        self.block_manager.take_prefix(sequence, match)
        if not sequence.group.num_preemptions:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)

    def _preempt(self, group: SequenceGroup, output: SchedulerOutput) -> None:
        """Send a group, the last one running, back to the queue: with its blocks on the host, or without blocks."""
        blocks = self.block_manager
        members = []
        while self.running and self.running[-1].group is group:
            members.append(self.running.pop())
        members.reverse()
        if not self.running and self._stalls_once_more(group):
            self._drop(group, members, output)
        status = SequenceStatus.SWAPPED if blocks.can_swap_out(members) else SequenceStatus.WAITING
        if status is SequenceStatus.SWAPPED:
            output.swap_out += blocks.swap_out(members)
            self.num_swapped += 1
        for sequence in members:
            if status is SequenceStatus.WAITING:
                blocks.free(sequence)
            sequence.status = status
        self._num_used_slots -= group.num_slots
        group.num_preemptions += 1
        output.preempted.append(group)
        if members:
            self.add(group)

    def _stalls_once_more(self, group: SequenceGroup) -> bool:
        """Count that a group which runs alone had to give way; True if it comes no further, however often it begins.

        The engine lets in only what fits, on the condition that the answers to a prompt share its blocks. Colliding
        hashes can keep them from it.
        """
        length = sum(sequence.num_tokens for sequence in group.unfinished)
        group.num_stalls = group.num_stalls + 1 if group.stalled_at == length else 1
        group.stalled_at = length
        return group.num_stalls > MAX_STALLS

    def _drop(self, group: SequenceGroup, members: list[Sequence], output: SchedulerOutput) -> None:
        """End the last sequence of a group, or all of a beam search, to make room for the others."""
        dropped = members.copy() if group.beams is not None else members[-1:]
        del members[len(members) - len(dropped) :]
        for sequence in dropped:
            self.block_manager.free(sequence)
            sequence.fail("the KV cache cannot hold all answers; ask for fewer")
        group.num_slots -= len(dropped)
        self._num_used_slots -= len(dropped)
        output.dropped += dropped[:1]

    # --- waiting ------------------------------------------------------------------------------------------------

    def _admit(self, output: SchedulerOutput, counts: list[int], partial: set[int], spare: int, withheld: int) -> int:
        """Start waiting groups in order of rank while tokens, places and blocks last; return the tokens left.

        ``withheld`` is what the pace takes off the budget.
        """
        blocks = self.block_manager
        due, is_exact = self._most_blocks_due(counts, partial), False
        while self.waiting and spare >= 1:
            group = self.waiting[-1]
            # A request for several answers comes in though the pace leaves it less than its places, or it never might.
            if group.num_slots > min(spare + withheld, self.max_num_running - self._num_used_slots):
                return spare
            if self.running and self._is_still_refused(group):
                return spare
            needed = self._blocks_to_start(group)
            if not is_exact and needed + due + self._watermark > blocks.num_free_blocks:
                due, is_exact = self._blocks_due(self.running, counts), True
            if self.running and needed + due + self._watermark > blocks.num_free_blocks:
                self._refused = (group, blocks.pool.num_released, blocks.awaited_hash(group.unfinished[0]))
                return spare
            members = group.unfinished
            if group.status is SequenceStatus.SWAPPED:
                output.swap_in += blocks.swap_in(members)
                self.num_swapped -= 1
            growths = self._plan(members, max(0, spare - group.num_slots))
            if blocks.num_blocks_to_grow(growths) > blocks.num_free_blocks:
                # Colliding hashes hid what it takes; alone it has room for the one sequence that begins.
                assert self.running, "add() let in what cannot fit"
                assert group.status is SequenceStatus.WAITING, "a swapped request found no room"
                return spare
            self.waiting.pop()
            place = self._enter(group, members, counts, partial)
            places = range(place, place + len(members))
            spare = self._grow(growths, places, counts, partial, spare - group.num_slots, output)
            due += self._blocks_due(members, counts[place : place + len(members)])
            output.admitted.append(group)
        return spare

    def _is_still_refused(self, group: SequenceGroup) -> bool:
        """Whether nothing has changed since a group found no room: spares a look-up in every step of a long wait."""
        if self._refused is None or self._refused[:2] != (group, self.block_manager.pool.num_released):
            return False
        return not self.block_manager.prefix_cache.is_published(self._refused[2])

    def _enter(self, group: SequenceGroup, members: list[Sequence], counts: list[int], partial: set[int]) -> int:
        """Put a group's sequences into the batch by rank; return the place of the first."""
        running = self.running
        place = len(running)
        while place and running[place - 1].group.priority_key > group.priority_key:
            place -= 1
        running[place:place] = members
        counts[place:place] = [1] * len(members)
        if place + len(members) < len(running) and partial:
            moved = {old + len(members) if old >= place else old for old in partial}
            partial.clear()
            partial |= moved
        for sequence in members:
            sequence.status = SequenceStatus.RUNNING
        self._num_used_slots += group.num_slots
        self._has_groups = self._has_groups or not members[0].is_single
        return place

    def _blocks_to_start(self, group: SequenceGroup) -> int:
        """Return the free blocks that a group takes for all its known tokens, not for a first chunk only.

        Else prefills would begin that must give way again. What the sequences of a group share counts once.
        """
        blocks, members = self.block_manager, group.unfinished
        if group.status is SequenceStatus.SWAPPED:
            return blocks.num_blocks_to_swap_in(members)
        if len(members) == 1:
            match = blocks.match_prefix(members[0])
            return blocks.num_blocks_for(members[0].num_tokens) - len(match.blocks) + match.num_evictable
        size = blocks.block_size
        if not blocks.enable_prefix_caching:
            return sum(blocks.num_blocks_for(one.num_tokens) for one in members)
        full = {one.block_hash(index, size) for one in members for index in range(one.num_tokens // size)}
        return len(full) + sum(one.num_tokens % size > 0 for one in members)

    def _most_blocks_due(self, counts: list[int], partial: set[int]) -> int:
        """Return the blocks that those in the batch still need for their known tokens and the next one, at most."""
        return len(self.running) + self._blocks_due([self.running[i] for i in partial], [counts[i] for i in partial])

    def _blocks_due(self, sequences: list[Sequence], counts: list[int]) -> int:
        due = 0
        for sequence, count in zip(sequences, counts, strict=True):
            known = max(sequence.num_tokens, sequence.num_computed_tokens + count + 1)
            due += self.block_manager.num_blocks_for(known) - len(sequence.block_table)
        return due

    # --- after a step -------------------------------------------------------------------------------------------

    def _forget_if_idle(self) -> None:
        """Keep no request alive that has ended."""
        if not self.running:
            self._due = []
        if not self.waiting:
            self._refused = None

    def _leave(self, sequence: Sequence) -> None:
        """Take a running sequence out of the batch and free its blocks and its place."""
        group = sequence.group
        if not sequence.is_single:
            group.note_sharing()
        self.running.remove(sequence)
        self.block_manager.free(sequence)
        if group.beams is not None:  # few beams may become many again: their places are theirs to the end
            num_slots = 0 if any(one.group is group for one in self.running) else group.num_slots
        else:
            num_slots = 1 if group.is_forked else group.num_slots
        self._num_used_slots -= num_slots
        group.num_slots -= num_slots

    def _advance_beams(self, sampling: list[Sequence], candidates: dict[int, Candidates]) -> list[Sequence]:
        """Let each beam search choose the beams that go on; return one sequence for each request that sampled."""
        got_token: dict[int, Sequence] = {}
        by_group: dict[int, list[tuple[Sequence, Candidates]]] = {}
        for position, sequence in enumerate(sampling):
            if position in candidates:
                by_group.setdefault(id(sequence.group), []).append((sequence, candidates[position]))
            else:
                got_token[id(sequence)] = sequence
        for beams in by_group.values():
            group = beams[0][0].group
            self._replace_beams(group, [one for one, _ in beams], [one for _, one in beams])
            got_token[id(group)] = group.sequences[0]
        return list(got_token.values())

    def _replace_beams(self, group: SequenceGroup, beams: list[Sequence], candidates: list[Candidates]) -> None:
        assert group.beams is not None
        going_on = group.beams.advance(
            [beam.token_ids for beam in beams],
            candidates,
            stop_token_ids=group.stop_token_ids,
            max_total_tokens=group.max_total_tokens,
        )
        if group.beams.is_done:
            self._end_beams(beams)
            return
        successors = []
        heirs: set[int] = set()  # parents whose own sequence goes on; further children are forks
        for index, one in enumerate(going_on):
            parent = beams[one.parent]
            successor = parent if one.parent not in heirs else parent.fork(index, group.seed)
            if successor is not parent:
                self.block_manager.fork(parent, successor)
            heirs.add(one.parent)
            successors.append(successor)
        for beam, continuation in zip(successors, going_on, strict=True):
            beam.cumulative_logprob = continuation.cumulative_logprob
            beam.token_ids.append(continuation.token_id)
        for place, beam in enumerate(beams):
            if place not in heirs:
                self.block_manager.free(beam)
        place = self.running.index(beams[0])
        self.running[place : place + len(beams)] = successors
        for index, beam in enumerate(successors):
            beam.index = index
        group.sequences = successors
        group.is_forked = True

    def _end_beams(self, beams: list[Sequence]) -> None:
        """End every beam of a finished search; the group's ``beams`` have the answers."""
        for beam in beams:
            self._leave(beam)
            beam.finish(FinishReason.STOP)
