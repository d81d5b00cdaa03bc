"""PlantedDraftModel: a draft model whose drafts are computed, and are right as often as a benchmark wants.

Two models with random weights never agree. So each request has a bias that makes one token by far the most likely one,
for both models: both choose it, whatever they have computed. Some tokens of the drafts are then replaced. What is
computed, launched and copied is that of any two models with the same shapes, and no rounding changes an answer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from deployments.cli.bench.prompts import VOCABULARY
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.drafting.draft_model import DraftModel, ModelDrafts
from engine.sequence import Sequence

__all__ = ["PlantedDraftModel", "biased_requests"]

_BIAS = 100.0


class PlantedDraftModel:
    """A draft model for ``biased_requests``.

    Args:
        model: computes the drafts.
        rate: the probability that a token is not replaced.
    """

    def __init__(self, model: DraftModel, rate: float) -> None:
        self._model, self._rate, self._rng = model, rate, random.Random(0)
        self.max_len, self.share, self.free_tokens = model.max_len, model.share, model.free_tokens

    def num_computed(self, sequence: Sequence) -> int:
        """As the model's."""
        return self._model.num_computed(sequence)

    def fill(self, ends: Mapping[Sequence, int], max_tokens: int | None = None) -> ModelDrafts:
        """As the model's."""
        return self._model.fill(ends, max_tokens)

    def draft(self, lengths: Mapping[Sequence, int]) -> ModelDrafts:
        """Return the model's drafts, with some tokens replaced."""
        drafts = self._model.draft(lengths)
        for sequence, token_ids in drafts.token_ids.items():
            drafts.token_ids[sequence] = [
                token_id if self._rng.random() < self._rate else token_id ^ 1 for token_id in token_ids
            ]
        return drafts


def biased_requests(streams: int, prompt_tokens: int, num_tokens: int, vocab_size: int) -> list[EngineRequest]:
    """Return requests with prompts of random tokens; an answer repeats one token."""
    rng = random.Random(streams)
    ids = range(VOCABULARY[0], min(VOCABULARY[1], vocab_size))
    return [
        EngineRequest(
            f"draft-model-{index}",
            rng.choices(ids, k=prompt_tokens),
            SamplingParams(
                temperature=0.0,
                logit_bias={rng.choice(ids): _BIAS},
                max_tokens=num_tokens,
                ignore_eos=True,
            ),
        )
        for index in range(streams)
    ]
