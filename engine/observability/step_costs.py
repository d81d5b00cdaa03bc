"""StepCosts: how long a step takes, as a linear function of what it computes; StepSpeeds measures it.

    seconds = base + prefill_token * (prompt tokens) + sequence * (answers) + kv_token * (tokens in their contexts)

Reading the weights is in ``base``, which steps without answers do not pay: they are full of prompts, and their reading
of the weights is in ``prefill_token``. The coefficients are fitted while the engine serves, by least squares of the
relative error. Old steps are forgotten by the second, so that a machine that is throttled is noticed at once.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

__all__ = ["StepCosts", "StepSpeeds"]

_MAX_S = 1e6
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=_MAX_S)]  # excludes NaN and infinity

# Seconds of steps after which the weight of a measurement has halved.
_FIT_HALF_LIFE_S, _RATE_HALF_LIFE_S = 0.5, 2.0
# Longest step that is counted, in multiples of the expected, so that a pause (of the garbage collector, say) does not
# distort the fit for long.
_MAX_SLOWDOWN = 4.0
# Fewest prompt tokens of a step that the prefill rate is measured by. With fewer, the fixed cost of a step makes
# prefill look slow.
_MIN_PREFILL_TOKENS = 128
_FIT_EVERY = 8  # steps; a fit takes 15 microseconds
_SWEEPS = 4
_NEGLIGIBLE = 1e-12


class StepCosts(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Seconds that the parts of a step take; all zero: nothing is measured yet."""

    base_s: _Seconds = 0.0
    prefill_token_s: _Seconds = 0.0
    sequence_s: _Seconds = 0.0
    kv_token_s: _Seconds = 0.0

    def seconds(self, num_prefill_tokens: int, num_sequences: int, num_kv_tokens: int) -> float:
        """Return the seconds of a step.

        Args:
            num_prefill_tokens: prompt tokens that it computes.
            num_sequences: answers that it continues by a token.
            num_kv_tokens: tokens in the contexts of these answers.
        """
        seconds = self.prefill_token_s * num_prefill_tokens
        if num_sequences:
            seconds += self.base_s + self.sequence_s * num_sequences + self.kv_token_s * num_kv_tokens
        return seconds


class StepSpeeds:
    """Measures the steps of one engine.

    The fit is non-negative and goes from the last coefficients to the best ones by coordinate descent, after a common
    factor: coefficients that the latest steps do not separate keep their ratio.
    """

    def __init__(self) -> None:
        self.costs = StepCosts()
        # Decayed sums over the steps, of products of what a step computes, per expected second.
        self._products = [[0.0] * 4 for _ in range(4)]
        self._sums = [0.0] * 4
        self._num_steps = 0
        self._rate_tokens = self._rate_seconds = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens per second of steps that mostly prefill, decodes included; 0 before the first one.

        Each step is weighted by its tokens, because a long queue is computed in full steps, and the steps of short
        prompts on an idle engine are slower per token.
        """
        return self._rate_tokens / self._rate_seconds if self._rate_seconds else 0.0

    def record(self, num_prefill_tokens: int, num_sequences: int, num_kv_tokens: int, seconds: float) -> None:
        """Take in the time of a step; the arguments are those of ``StepCosts.seconds``."""
        if seconds <= 0 or not num_prefill_tokens + num_sequences:
            return
        num_tokens = num_prefill_tokens + num_sequences
        if num_prefill_tokens >= _MIN_PREFILL_TOKENS and 2 * num_prefill_tokens >= num_tokens:
            decay = 0.5 ** (seconds / _RATE_HALF_LIFE_S)
            self._rate_tokens = decay * self._rate_tokens + num_tokens * num_tokens
            self._rate_seconds = decay * self._rate_seconds + num_tokens * seconds
        expected = self.costs.seconds(num_prefill_tokens, num_sequences, num_kv_tokens)
        if not expected:
            expected = seconds
        counted = min(seconds, _MAX_SLOWDOWN * expected)
        parts = (1.0 if num_sequences else 0.0, num_prefill_tokens, num_sequences, num_kv_tokens)
        self._add([part / expected for part in parts], counted / expected, 0.5 ** (counted / _FIT_HALF_LIFE_S))
        self._num_steps += 1
        if self._num_steps < _FIT_EVERY or self._num_steps % _FIT_EVERY == 0:
            self.costs = self._fit()

    def _add(self, parts: list[float], slowdown: float, decay: float) -> None:
        """Add a step to the sums: what it computed, per expected second, and its seconds, per expected one."""
        for row, (products, part) in enumerate(zip(self._products, parts, strict=True)):
            self._sums[row] = decay * self._sums[row] + part * slowdown
            products[:] = [decay * product + part * other for product, other in zip(products, parts, strict=True)]

    def _fit(self) -> StepCosts:
        old = self.costs
        fitted = [old.base_s, old.prefill_token_s, old.sequence_s, old.kv_token_s]
        products, sums = self._products, self._sums
        square = sum(
            one * other * product
            for one, row in zip(fitted, products, strict=True)
            for other, product in zip(fitted, row, strict=True)
        )
        if square > 0:
            factor = sum(value * total for value, total in zip(fitted, sums, strict=True)) / square
            fitted = [value * factor for value in fitted]
        for _ in range(_SWEEPS):
            for index, (row, total) in enumerate(zip(products, sums, strict=True)):
                if row[index] > _NEGLIGIBLE:
                    others = sum(value * product for value, product in zip(fitted, row, strict=True))
                    fitted[index] = max(0.0, fitted[index] + (total - others) / row[index])
        return StepCosts(*(min(seconds, _MAX_S) for seconds in fitted))  # else routers would reject the report
