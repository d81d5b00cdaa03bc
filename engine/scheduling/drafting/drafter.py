"""Drafter: which sequences compute draft tokens in a step, and which of these are accepted.

A proposer guesses the next tokens of a sequence: its draft. One step computes them after the last known token, and
samples after each of them, as if the draft were right up to there:

    known, last   | draft                    the token sampled after each
    ... t         | a    b    c    d         t -> a,  a -> b,  b -> x,  c -> ?,  d -> ?

The samples agree with ``a`` and ``b``, and ``x`` follows them: the sequence gets a, b and x in this step. The slots of
c and d hold K and V of rejected tokens. The next tokens of the sequence overwrite them, and no block is published
before its tokens are known.

A sample is a pure function of the logits, the parameters, the seed and the tokens before it. After ``a`` it is drawn
from a *continuation*: a copy of the sequence that ends with ``a``, whose grammar has accepted ``a`` too. So penalties,
masks and noise are those of a step without drafts, and the answer is the same, with any parameters. This is
speculative decoding (Leviathan et al., 2023) with equality as the test. Beams get no drafts: a search keeps several
tokens after each, not one that a draft could equal.

Drafts use what the batch leaves of the token budget, and blocks that no sequence of the batch needs for its next step.
Blocks that only rejected draft tokens use are freed at the end of the step. This module knows no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass
from time import perf_counter

from engine.kv.block_manager import BlockManager
from engine.scheduling.drafting.acceptance import Acceptance
from engine.scheduling.drafting.continuations import continuations_of
from engine.scheduling.drafting.draft_model import DraftModel
from engine.scheduling.drafting.model_drafting import ModelDrafting
from engine.scheduling.drafting.payoff import Payoff
from engine.scheduling.drafting.proposer import Proposer
from engine.scheduling.sampled_results import record_logprobs
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput
from engine.scheduling.step_builder import StepBuilder
from engine.sequence import Sequence, SequenceGroup

__all__ = ["Drafter", "accepted_tokens"]


_MANY = 5  # sequences, for which one question to Payoff costs less than one to a proposer for each
_SKIPPED_STEPS = 7  # after one in which drafts pay for none of many


@dataclass(slots=True)
class _Room:
    """What a step has for further drafts.

    Attributes:
        num_blocks: that no sequence of the batch needs for its next step.
        num_tokens: of the step so far.
        num_expected: tokens that the step is expected to give so far.
    """

    num_blocks: int
    num_tokens: int
    num_expected: float


class Drafter:
    """Adds drafts to the batches of one scheduler.

    Args:
        block_manager: allocates the blocks of drafts.
        proposers: guess the tokens, by name; the first that proposes any for a sequence is used.
        num_tokens: draft tokens of one sequence in a step, at most.
        payoff: limits drafts to those that are expected to pay; None sets no such limit.
        draft_model: drafts for sequences for which no proposer does.
        model_name: of the drafter that ``draft_model`` is.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        proposers: dict[str, Proposer],
        num_tokens: int,
        payoff: Payoff | None = None,
        draft_model: DraftModel | None = None,
        model_name: str = "draft_model",
    ) -> None:
        self.proposers = proposers
        self.num_tokens = num_tokens
        self._blocks = block_manager
        self.payoff = payoff
        self.acceptance = Acceptance()
        self.model = None if draft_model is None else ModelDrafting(draft_model, self.acceptance)
        self._model_name = model_name
        self._had_drafts = False  # the last step
        self._num_skipped = 0  # steps of many sequences that get no drafts, before Payoff is asked again

    def may_draft(self, sequence: Sequence) -> bool:
        """Whether a sequence may get drafts: it is not a beam, and its request has forked all its answers.

        With recurrent layers, the tokens that a rejected draft has led to are computed again, like a prefill. The
        answers of one request would wait for each other then, so they get no drafts.
        """
        group = sequence.group
        return group.is_forked and group.beams is None and (sequence.is_single or self._blocks.states is None)

    def awaits_token(self, sequence: Sequence) -> bool:
        """Whether the next token of a sequence must be known before the next step, because it may get a draft then."""
        return not self._num_skipped and self.may_draft(sequence) and self.acceptance.may_get_draft(sequence)

    def add_drafts(self, step: StepBuilder) -> None:
        """Add drafts to a batch that is otherwise complete, and allocate their blocks."""
        if step.token_budget < 1:
            return
        room = _Room(
            num_blocks=self._blocks.num_growable_blocks - step.max_blocks_needed(),
            num_tokens=sum(step.num_new_tokens),
            num_expected=float(len(step.running) - len(step.not_sampling)),
        )
        undrafted = []
        for index in self._candidates(step, room):
            if not self._is_ready(step, index):
                continue
            sequence = step.running[index]
            name, proposed = self._propose(sequence, self._limit(sequence, step, room.num_blocks), step)
            if proposed or self.model is None:
                self._add(step, index, name, proposed, room)
            else:
                undrafted.append(index)
        if self.model is not None:
            started = perf_counter()
            self._draft_with_model(self.model, undrafted, step, room)
            seconds = perf_counter() - started
            step.output.draft_model_seconds = step.output.drafting_seconds[self._model_name] = seconds

    def _is_ready(self, step: StepBuilder, index: int) -> bool:
        """Whether a running sequence decodes in this step, and may get a draft."""
        sequence = step.running[index]
        is_decode = step.num_new_tokens[index] == 1 and index not in step.not_sampling and not sequence.num_pending
        return is_decode and self.may_draft(sequence)

    def _add(self, step: StepBuilder, index: int, name: str, proposed: list[int], room: _Room) -> bool:
        """Add what pays of a draft to the step; return whether that is any token."""
        sequence = step.running[index]
        if not proposed:
            self.acceptance.record_draft(sequence, has_draft=False)
            return False
        paying, num_right = self._paying(sequence, len(proposed), step, room)
        continuations = continuations_of(sequence, proposed[:paying])
        self.acceptance.record_draft(sequence, has_draft=bool(continuations))
        if not continuations or (self._blocks.states is not None and not self._blocks.states.back_up(sequence)):
            return False
        draft = continuations[-1].token_ids[len(sequence.token_ids) :]
        room.num_blocks -= self._blocks.extend(sequence, sequence.num_tokens + len(draft))
        step.add_draft(index, draft, continuations, name)
        room.num_tokens, room.num_expected = room.num_tokens + len(draft), room.num_expected + num_right
        return True

    # --- a draft model ------------------------------------------------------------------------------------------

    def _draft_with_model(self, model: ModelDrafting, indices: list[int], step: StepBuilder, room: _Room) -> None:
        """Let the draft model catch up with the sequences of a step, and draft for those of these indices.

        Those that join the batch in this step wait: their blocks may still have to be copied to the device.
        """
        admitted = set(step.output.admitted)
        indices = [index for index in indices if step.running[index].group not in admitted]
        limits = self._model_limits(model, indices, step, room)
        lengths = model.lengths(limits, self.payoff, room.num_tokens, room.num_expected)
        if model.is_on:
            self._fill(model, step, admitted, room.num_tokens)
        for sequence, length in lengths.items():
            room.num_blocks -= self._blocks.extend(sequence, sequence.num_tokens + length)
        drafts = model.draft(lengths) if lengths else {}
        waiting = limits.keys() - lengths.keys() if model.is_on else set()  # for another step, which is not a miss
        for index in indices:
            sequence = step.running[index]
            if sequence in waiting:
                continue
            is_added = self._add(step, index, self._model_name, drafts.get(sequence, []), room)
            if sequence in lengths and not is_added:
                self._blocks.free_draft_blocks(sequence, sequence.num_tokens)

    def _model_limits(
        self, model: ModelDrafting, indices: list[int], step: StepBuilder, room: _Room
    ) -> dict[Sequence, int]:
        """Return the draft tokens of each of these sequences that fit the step together; of those with any."""
        limits: dict[Sequence, int] = {}
        num_blocks, budget = room.num_blocks, step.token_budget
        for index in indices:
            sequence = step.running[index]
            limit = model.limit(sequence, min(budget, self._limit(sequence, step, num_blocks)))
            if limit:
                limits[sequence] = limit
                budget -= limit
                num_held = len(sequence.block_table)
                num_blocks -= max(0, self._blocks.num_blocks_for(sequence.num_tokens + limit) - num_held)
        return limits

    def _fill(self, model: ModelDrafting, step: StepBuilder, admitted: set[SequenceGroup], num_tokens: int) -> None:
        """Let the draft model compute what the large one has computed of prompts."""
        computed = {
            sequence: sequence.num_computed_tokens
            for sequence in step.running
            if sequence.group.beams is None and sequence.group not in admitted
        }
        model.fill(computed, self.payoff, num_tokens)

    # --- how many tokens ----------------------------------------------------------------------------------------

    def _candidates(self, step: StepBuilder, room: _Room) -> Iterable[int]:
        """Return the indices of the sequences that may get drafts: all, unless drafts pay for none of many."""
        running = step.running
        if self.payoff is None or len(running) < _MANY:
            return range(len(running))
        if self._num_skipped > 1:
            self._num_skipped -= 1
            return ()
        # In the last of them Payoff is asked for the next step, so that steps which overlap need not wait for tokens.
        self._num_skipped = 0
        best_rate = self.acceptance.best_rate
        for limit in (1, self.num_tokens):  # most often one token tells
            if self.payoff.draft_tokens(best_rate, limit, room.num_tokens, room.num_expected)[0]:
                return range(len(running))
        if not self.payoff.may_try(room.num_tokens, len(running)):
            self._num_skipped = _SKIPPED_STEPS
            if self.model is not None and not self.payoff.is_stale(room.num_tokens):
                self.model.is_on = False  # even tokens that took no time to draft would not pay
            return ()
        for sequence in running:
            if not self.acceptance.is_retried(sequence):
                self.acceptance.record_draft(sequence, has_draft=False)
        return [index for index, sequence in enumerate(running) if self.acceptance.is_retried(sequence)]

    def _limit(self, sequence: Sequence, step: StepBuilder, num_blocks: int) -> int:
        """Return how many draft tokens fit the rest of the step and these blocks."""
        # The step samples one token more than the draft has, and the last token of an answer is never computed.
        before_end = sequence.max_total_tokens - sequence.num_tokens - 1
        num_slots = (len(sequence.block_table) + max(0, num_blocks)) * self._blocks.block_size - sequence.num_tokens
        return max(0, min(self.num_tokens, step.token_budget, step.chunk_limit - 1, before_end, num_slots))

    def _paying(self, sequence: Sequence, num_proposed: int, step: StepBuilder, room: _Room) -> tuple[int, float]:
        """Return how many of the proposed tokens pay, and how many of these may be right."""
        if self.payoff is None:
            return num_proposed, 0.0
        rate = self.acceptance.rate(sequence)
        paying, num_right = self.payoff.draft_tokens(rate, num_proposed, room.num_tokens, room.num_expected)
        if paying or not self.acceptance.is_retried(sequence):
            return paying, num_right
        if self.payoff.may_try(room.num_tokens, len(step.running)):
            return 1, rate
        return paying, num_right

    def _propose(self, sequence: Sequence, limit: int, step: StepBuilder) -> tuple[str, list[int]]:
        """Return the first draft that a proposer has, of up to ``limit`` tokens, and the proposer's name."""
        if not limit:
            return "", []
        seconds = step.output.drafting_seconds
        for name, proposer in self.proposers.items():
            started = perf_counter()
            draft = proposer.propose(sequence, limit)
            seconds[name] = seconds.get(name, 0.0) + perf_counter() - started
            if draft:
                return name, draft
        return "", []

    def record_step(self, output: SchedulerOutput, seconds: float) -> None:
        """Take in how long a step took without a draft model, for the choice of drafts that pay.

        The first step after one with drafts is not typical of those without: the sampler has another batch to prepare.
        """
        is_typical = bool(output.drafts) or not self._had_drafts
        self._had_drafts = bool(output.drafts)
        if self.payoff is not None and is_typical:
            self.payoff.record_step(output.num_tokens, seconds)

    def learn(self, group: SequenceGroup) -> None:
        """Let the proposers take in a request that has left the engine."""
        for proposer in self.proposers.values():
            proposer.learn(group)

    def accept(self, output: SchedulerOutput, sampled: SampledTokens) -> list[Sequence]:
        """Append what was sampled after the right draft tokens to their sequences, after the token that each has.

        Returns:
            The sequences that end with one of them.
        """
        ended = []
        for sequence, draft in output.drafts.items():
            was_finished = sequence.is_finished
            num_accepted = 0
            if not was_finished:
                output.num_accepted[sequence] = num_accepted = _append_accepted(sequence, output, sampled)
                self.acceptance.record_outcome(sequence, num_accepted, len(draft))
            sequence.num_computed_tokens += num_accepted
            self._blocks.free_draft_blocks(sequence)
            if self._blocks.states is not None:
                self._settle_state(sequence, num_accepted, len(draft))
            if sequence.is_finished and not was_finished:
                ended.append(sequence)
        return ended

    def _settle_state(self, sequence: Sequence, num_accepted: int, num_drafted: int) -> None:
        """Let the states be those after the computed tokens.

        A state that has seen a rejected token is that before the step again, and the accepted tokens are computed once
        more. Their keys and values are written again too, with the same bits.
        """
        assert self._blocks.states is not None
        if sequence.state_slot < 0:  # it was ended while the step was in flight
            return
        if num_accepted == num_drafted or sequence.is_finished:
            self._blocks.states.drop_backup(sequence)
            return
        self._blocks.states.restore(sequence)
        sequence.num_computed_tokens -= 1 + num_accepted
        sequence.next_block_boundary = 0  # it must be scheduled, like a prefill


def _append_accepted(sequence: Sequence, output: SchedulerOutput, sampled: SampledTokens) -> int:
    """Append the tokens sampled after right draft tokens until the sequence ends; return their number."""
    num_accepted = 0
    draft, continuations = output.drafts[sequence], output.continuations[sequence]
    logprobs = sampled.logprobs_after_drafts.get(sequence)
    accepted = accepted_tokens(sequence.token_ids[-1], draft, sampled.after_drafts[sequence])
    for index, token_id in enumerate(accepted):
        if logprobs is not None:
            record_logprobs(sequence, logprobs[index])
        sequence.grammar = continuations[index].grammar  # it has made the mask for this token
        sequence.token_ids.append(token_id)
        sequence.check_end(token_id)
        num_accepted += not sequence.has_failed  # if it has, the token is removed again
        if sequence.is_finished:
            break
    return num_accepted


def accepted_tokens(token_id: int, draft: list[int], after_draft: GenericSequence[int]) -> Iterator[int]:
    """Yield the tokens that follow ``token_id`` as far as the samples agree with the draft.

    Args:
        token_id: what was sampled where the draft begins.
        draft: the draft tokens.
        after_draft: what was sampled after each of them; shorter if there is none.
    """
    for draft_token, following in zip(draft, after_draft, strict=False):
        if draft_token != token_id:
            return
        yield following
        token_id = following
