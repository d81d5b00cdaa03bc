"""ClusterLoad: how busy the replicas of a deployment are on average, and what that makes a second of prefill cost.

A second of prefill on one replica costs others, wherever it is spent, because what one replica is spared is used to
relieve the others:

- the prompts that come later. As in any queue, work delays all of them until the queue is next empty, which are
  ``pending / (1 - b)``. ``pending`` is the mean number of prompts that wait or are computed at a replica, and ``b`` the
  share of the time in which there are any.
- the answers in its batch, ``decoding`` of them, by one second each, which weighs less than one before a first token.
- those whose cached blocks it evicts. A computed block takes the place of another one, which would have been used again
  with a probability of at most ``reuse``, the cached tokens of recent prompts over the computed ones.

    price = pending / (1 - b) + decoding / first_token_weight + min(1, reuse)

What an answer costs by decoding where it does counts ``1 + reuse`` times, because the prompts that continue it will go
where it is cached. How busy the replicas are does not matter there: an answer adds as much to a step that also computes
prompts, and it takes no more steps.

The means are over the last half minute, of what the replicas report and this ingress has dispatched since. Decisions
sample them; requests that arrive at random see averages over time.

It is arithmetic only: times come from the caller.
"""

from __future__ import annotations

from math import exp

from deployments.routing.cost import Prices

__all__ = ["ClusterLoad"]

_MEMORY_S = 30.0  # of the means
_MIN_IDLE = 0.1  # 1 - b at least: nearer to 0, chance decides it
_FIRST_TOKENS = 65_536.0  # cached and computed, until many prompts have been sent: a reuse of 1
_KEPT = 0.99  # of the sums of tokens, at each prompt
_FIRST_LENGTH = 256.0  # tokens of an answer, until some have ended
_LENGTH_WEIGHT = 0.02  # of the latest answer in the mean length


class ClusterLoad:
    """Means over the replicas and over time."""

    def __init__(self) -> None:
        self._pending = self._decoding = self._busy = 0.0
        self._sampled_at: float | None = None
        self._cached_tokens = self._computed_tokens = _FIRST_TOKENS  # of recent prompts
        self._answer_tokens = 0.0
        self._num_answers = 0

    def sample(self, pending: float, decoding: float, busy: float, now: float) -> None:
        """Take in the means over the replicas at a time: answers that are pending, that decode, and busy replicas."""
        weight = 1.0 if self._sampled_at is None else 1 - exp(min(0.0, self._sampled_at - now) / _MEMORY_S)
        self._sampled_at = now
        self._pending += weight * (pending - self._pending)
        self._decoding += weight * (decoding - self._decoding)
        self._busy += weight * (busy - self._busy)

    def sent(self, num_cached_tokens: int, num_uncached_tokens: int) -> None:
        """Take in a prompt that is sent to a replica."""
        self._cached_tokens = _KEPT * self._cached_tokens + num_cached_tokens
        self._computed_tokens = _KEPT * self._computed_tokens + num_uncached_tokens

    def answered(self, num_tokens: int) -> None:
        """Take in the length of an answer."""
        self._num_answers += 1
        self._answer_tokens += max(_LENGTH_WEIGHT, 1 / self._num_answers) * (num_tokens - self._answer_tokens)

    @property
    def answer_tokens(self) -> float:
        """Mean length of recent answers."""
        return self._answer_tokens if self._num_answers else _FIRST_LENGTH

    def prices(self, max_tokens: int | None, first_token_weight: float) -> Prices:
        """Return the prices for a request.

        Args:
            max_tokens: the most that it generates; None sets no limit.
            first_token_weight: how many seconds after a first token one second before it outweighs.
        """
        idle = max(_MIN_IDLE, 1 - self._busy)
        length = self.answer_tokens if max_tokens is None else min(self.answer_tokens, max_tokens)
        reuse = self._cached_tokens / self._computed_tokens
        memory = min(1.0, reuse)
        prefill = self._pending / idle + self._decoding / first_token_weight + memory
        return Prices(prefill, (1 + reuse) * length / first_token_weight, memory)
