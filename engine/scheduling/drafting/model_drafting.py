"""ModelDrafting: which sequences a draft model drafts for in a step, and how many tokens.

All drafts of a step grow together, by one token in each pass of the draft model. Each pass takes time before the large
model begins, so the number of passes is chosen for the whole step: the one with which the step is expected to give the
most tokens in a second, the time of the passes included. Where that is none, the draft model computes nothing, but a
token of one sequence now and then, to find out whether it would pay by now.

This module knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from engine.scheduling.drafting.acceptance import RETRY_TOKENS, Acceptance
from engine.scheduling.drafting.cost_curve import CostCurve
from engine.scheduling.drafting.draft_model import DraftModel, ModelDrafts
from engine.scheduling.drafting.payoff import LEAST_CHANCE, MARGIN, MOST_TRIED, Payoff
from engine.sequence import Sequence

__all__ = ["ModelDrafting"]

_MOST_FILLED, _LEAST_FILLED = 2048, 16  # tokens of a step that prepares drafts
_USUAL_LAG = 2  # of a sequence whose draft was right: its last token of that draft, and the token after it
_MOST_LAG = 128  # tokens that are computed in the pass that drafts; more are computed before, in steps of their own
_MOST_LAG_PER_TOKEN = 8  # of the rest of the answer: else they are not worth computing


class ModelDrafting:
    """The draft model of one engine, and what it costs.

    Args:
        model: the draft model.
        acceptance: of the drafts so far.

    Attributes:
        is_on: whether the last drafts that were considered were expected to pay. Only then does the draft model follow
            the prompts that the large one computes.
    """

    def __init__(self, model: DraftModel, acceptance: Acceptance) -> None:
        self.model = model
        self.is_on = True
        self._acceptance = acceptance
        self._curve = CostCurve(model.free_tokens)

    def limit(self, sequence: Sequence, limit: int) -> int:
        """Return how many of ``limit`` tokens the draft model has positions for."""
        return max(0, min(limit, self.model.max_len - sequence.num_tokens))

    def lengths(
        self, limits: Mapping[Sequence, int], payoff: Payoff | None, num_tokens: int, num_expected: float
    ) -> dict[Sequence, int]:
        """Return the tokens to draft for sequences; those that are left out get none.

        Args:
            limits: tokens of each draft, at most.
            payoff: None: as many as possible.
            num_tokens: tokens of the step so far.
            num_expected: tokens that the step is expected to give so far.
        """
        lags = {sequence: sequence.num_tokens - self.model.num_computed(sequence) for sequence in limits}
        if payoff is None:
            return dict(limits)
        if payoff.is_stale(num_tokens):  # a step without drafts is measured
            return {}
        ready = self._ready(limits, lags, payoff, num_tokens)
        if ready:
            # What the model lacks is computed once: whether drafts pay is a question about the passes after that.
            num_usual = sum(min(lags[sequence], _USUAL_LAG) for sequence in ready)
            self.is_on = self._best_passes(ready, num_usual, payoff, num_tokens, num_expected) > 0
            if self.is_on:
                num_first = sum(lags[sequence] for sequence in ready)
                num_passes = max(1, self._best_passes(ready, num_first, payoff, num_tokens, num_expected))
                return {sequence: min(limit, num_passes) for sequence, limit in ready.items()}
        return self._tried(lags, payoff, num_tokens)

    def _ready(
        self, limits: Mapping[Sequence, int], lags: Mapping[Sequence, int], payoff: Payoff, num_tokens: int
    ) -> dict[Sequence, int]:
        """Return the sequences with the usual lag, and those of the others whose tokens one pass may catch up with.

        That is one of them, and as many more as take the time of a step at most. The rest follow in the next steps.
        """
        lagging = [sequence for sequence in limits if _USUAL_LAG < lags[sequence] <= _MOST_LAG]
        num_left = max(self._affordable(payoff, num_tokens), lags[lagging[0]]) if lagging else 0
        left_out = set()
        for sequence in lagging:
            if lags[sequence] > num_left:
                left_out.add(sequence)
            else:
                num_left -= lags[sequence]
        return {
            sequence: limit
            for sequence, limit in limits.items()
            if lags[sequence] <= _MOST_LAG and sequence not in left_out
        }

    def fill(self, sequences: Mapping[Sequence, int], payoff: Payoff | None, num_tokens: int) -> None:
        """Let the draft model catch up with sequences; that takes about as long as the step, at most.

        Args:
            sequences: and how many of their tokens the large model has computed.
            payoff: None: as much as one pass computes.
            num_tokens: of the step.
        """
        if lagging := self.lagging(sequences):
            self.model.fill(lagging, None if payoff is None else self._affordable(payoff, num_tokens))

    def _affordable(self, payoff: Payoff, num_tokens: int) -> int:
        """Return how many tokens the draft model computes in the time of a step."""
        most = _MOST_FILLED
        while most > _LEAST_FILLED and self._cost(most, payoff) > payoff.cost(num_tokens):
            most //= 2
        return most

    def lagging(self, sequences: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Return the tokens up to which the draft model is to compute those sequences that it has to catch up with.

        Args:
            sequences: and how many of their tokens the large model has computed.
        """
        return {
            sequence: end
            for sequence, end in sequences.items()
            if end <= self.model.max_len
            and _MOST_LAG_PER_TOKEN * (sequence.max_total_tokens - sequence.num_tokens)
            >= end - self.model.num_computed(sequence)
            > (0 if sequence.remaining_tokens > 1 else _MOST_LAG)
        }

    def draft(self, lengths: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Return the drafts of sequences, whose blocks have room for them."""
        drafts: ModelDrafts = self.model.draft(lengths)
        for num_tokens, seconds in drafts.passes:
            self._curve.record_step(num_tokens, seconds)
        return drafts.token_ids

    def _cost(self, num_tokens: int, payoff: Payoff) -> float:
        """Return the seconds of a pass, from the size of the weights before any is measured."""
        return self._curve.cost(num_tokens) if self._curve.is_measured else self.model.share * payoff.cost(num_tokens)

    def _best_passes(
        self, limits: Mapping[Sequence, int], num_first: int, payoff: Payoff, num_tokens: int, num_expected: float
    ) -> int:
        """Return the number of passes with which the step is expected to give the most tokens in a second."""
        seconds = payoff.cost(num_tokens)
        best, speed, expected = 0, num_expected / seconds, num_expected
        rates = [(self._acceptance.rate(sequence), limit) for sequence, limit in limits.items()]
        added, num_drafted = 0.0, 0
        for count in range(1, max(limits.values(), default=0) + 1):
            chances = [rate**count for rate, limit in rates if limit >= count]
            if max(chances) < LEAST_CHANCE:
                break
            expected, num_drafted = expected + sum(chances), num_drafted + len(chances)
            added += self._cost(num_first if count == 1 else len(chances), payoff)
            with_drafts = seconds + MARGIN * (payoff.cost(num_tokens + num_drafted) - seconds + added)
            if expected / with_drafts > speed:
                best, speed = count, expected / with_drafts
        return best

    def _tried(self, lags: Mapping[Sequence, int], payoff: Payoff, num_tokens: int) -> dict[Sequence, int]:
        """Return a sequence whose draft may be tried although it does not pay: the more that costs, the less often."""
        if not payoff.may_try(num_tokens, len(lags)):
            return {}
        seconds = payoff.cost(num_tokens)
        for sequence, lag in lags.items():
            if self._acceptance.is_retried(sequence):
                price = (payoff.cost(num_tokens + 1) + self._cost(lag, payoff)) / seconds - 1.0
                if sequence.num_tokens // RETRY_TOKENS % max(1, ceil(price / MOST_TRIED)) == 0:
                    return {sequence: 1}
        return {}
