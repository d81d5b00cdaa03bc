"""Payoff: how many draft tokens a sequence should get, so that a step gives more tokens in a second.

A draft token is right with the probability that all tokens of the draft up to it are: p, p^2, p^3 and so on. The step
then gives one token more. It takes longer by what one more token costs. A draft therefore ends before the token with

    (tokens + probability) / seconds with it   <   tokens / seconds without it

where the tokens are those that the step is expected to give. How long a step takes depends on how many tokens it
computes. That is measured while steps run. On a CPU the first few cost nearly nothing beside reading the weights, and
each further one as much as the last; there a batch of many sequences leaves no token that pays, and drafts end.

What is chosen here changes how fast an answer comes, and never the answer. It is the idea of goodput-optimised
speculation (Liu et al., 2024), without a model of the cost.
"""

from __future__ import annotations

from engine.scheduling.drafting.cost_curve import CostCurve

__all__ = ["LEAST_CHANCE", "MARGIN", "MOST_TRIED", "Payoff"]

LEAST_CHANCE = 0.02  # of a token that is drafted
MARGIN = 1.1  # of the time that a draft adds: what is measured is uncertain
MOST_TRIED = 0.15  # of a step's time, once in as many tokens as Acceptance says: about one percent in all


class Payoff:
    """Chooses the length of drafts.

    Args:
        free_tokens: tokens that a step computes in about the time of one token, for what is not measured yet; None:
            hundreds, as on a GPU.
    """

    def __init__(self, free_tokens: int | None) -> None:
        self._curve = CostCurve(free_tokens)

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Take in how long a step took."""
        self._curve.record_step(num_tokens, seconds)

    def cost(self, num_tokens: int) -> float:
        """Return the seconds of a step, or a number in proportion to them before any step is measured."""
        return self._curve.cost(num_tokens)

    def is_stale(self, num_tokens: int) -> bool:
        """Whether no step of this size was measured lately, so that one without drafts is to be measured."""
        return self._curve.is_stale(num_tokens)

    def draft_tokens(self, rate: float, limit: int, num_tokens: int, num_expected: float) -> tuple[int, float]:
        """Return how many draft tokens pay, and how many of them are expected to be right.

        Args:
            rate: the probability that a draft token is right if the one before it is.
            limit: draft tokens, at most.
            num_tokens: tokens of the step so far.
            num_expected: tokens that the step is expected to give so far.
        """
        best, gained, chance, expected = 0, 0.0, 1.0, num_expected
        if self.is_stale(num_tokens):
            return best, gained
        seconds = self.cost(num_tokens)
        speed = num_expected / seconds
        most_right = min(limit, rate / (1.0 - rate)) if rate < 1.0 else limit
        least_seconds = seconds + MARGIN * (self.cost(num_tokens + 1) - seconds)
        if (num_expected + most_right) / least_seconds <= speed:  # quick: most often so in a full batch
            return best, gained
        for count in range(1, limit + 1):
            chance *= rate
            if chance < LEAST_CHANCE:
                break
            expected += chance
            with_draft = expected / (seconds + MARGIN * (self.cost(num_tokens + count) - seconds))
            if with_draft > speed:  # costs rise in steps: a longer draft may pay where a shorter one does not
                best, gained, speed = count, expected - num_expected, with_draft
        return best, gained

    def may_try(self, num_tokens: int, num_sequences: int) -> bool:
        """Whether a token of each of these sequences costs so little that drafts may be tried that do not pay now."""
        price = self.cost(num_tokens + 1) / self.cost(num_tokens) - 1.0
        return not self.is_stale(num_tokens) and price * num_sequences <= MOST_TRIED
