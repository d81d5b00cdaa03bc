"""StepCosts: how long a step takes, as a linear function of what it computes.

    seconds = base + prefill_token * (prompt tokens) + sequence * (answers) + kv_token * (tokens that answers attend to)

Reading the weights is in ``base``, reading the KV cache in ``kv_token``. ``base`` is only paid by steps that compute
answers, as far as routers are concerned: a step that computes prompts alone is full, and its share of the weights'
reading is in ``prefill_token``.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

__all__ = ["StepCosts"]

_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e6)]  # excludes NaN and infinity


class StepCosts(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Seconds that parts of a step take; all zero: nothing is measured yet."""

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
