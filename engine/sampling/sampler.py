"""Sampler: from logits to tokens.

Sampling is a pure function of (logits, parameters, seed, position). It does not depend on the other sequences of the
batch, on earlier samples, or on the replica. ``filters`` changes the logits, ``choosers`` chooses a token from them,
and ``noise`` makes a random choice reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from math import isfinite, isnan

import torch

from engine.outputs import TokenLogprobs
from engine.request import EngineRequest
from engine.sampling.batch import SamplingBatch
from engine.sampling.ranking import gather_logprobs, top_tokens
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.scheduling.scheduler_output import SampledTokens
from engine.sequence import Sequence, SequenceGroup
from engine.structured_outputs.bitmask import apply_bitmask
from kernels.argmax import argmax_rows

__all__ = ["Sampler"]

NUM_CANDIDATES = 1024
NO_TOKEN = -1
NO_CHOICE = "no token can be sampled: the logits hold a NaN or infinity, or every token is forbidden"


class Sampler:
    """Chooses the tokens of a batch.

    Args:
        vocab_size: width of the logits.
        device: device of the logits.
        num_candidates: how many of the most likely tokens top-p tries before it sorts the vocabulary.
    """

    def __init__(self, vocab_size: int, device: torch.device, *, num_candidates: int = NUM_CANDIDATES) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._num_candidates = num_candidates
        self._batch: SamplingBatch | None = None

    def reset(self) -> None:
        """Forget the last batch, so that the next one is built from its sequences."""
        self._batch = None

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        sequences: Sequence_[Sequence],
        grammar: tuple[list[int], torch.Tensor] | None = None,
    ) -> SampledTokens:
        """Choose a token for each sequence; for a beam, find the most likely tokens.

        Args:
            logits: float32 [batch_size, vocab_size]; overwritten.
            sequences: the batch; all different.
            grammar: indices of the batch, and their bitmasks of allowed tokens, int32 [n, ceil(vocab_size / 32)].

        Returns:
            The token ids: -1 for beams, and 0 for sequences that failed because their logits hold a NaN or +inf or
            because every token is forbidden. A failure does not affect other sequences. Log-probabilities are those of
            the model's own logits; tokens that min_tokens forbids to a beam are at -inf.
        """
        if not sequences:
            return SampledTokens([])
        batch = self._batch_of(sequences)
        beams = self._search(logits, batch)
        raw = (
            logits.index_select(0, batch.logprob_indices_on_device).log_softmax(dim=1)
            if batch.logprob_indices
            else None
        )
        for one in batch.filters:
            one.apply(logits)
        if grammar is not None:
            apply_bitmask(logits, *grammar)  # last, so that no filter can allow a token again
        tokens = torch.zeros(len(sequences), dtype=torch.int64, device=logits.device)
        best = torch.zeros(len(sequences), device=logits.device)
        for chooser in batch.choosers:
            chooser.choose(logits, tokens, best)
        logprobs = None if raw is None else self._logprobs(raw, tokens, batch, len(sequences))
        token_ids: list[int] = tokens.masked_fill_(~best.isfinite(), NO_TOKEN).tolist()
        return _finish(token_ids, logprobs, beams)

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: torch.Tensor, token_ids: Sequence_[int], num_top_tokens: Sequence_[int]
    ) -> list[TokenLogprobs]:
        """Return log-probabilities of prompt tokens.

        Args:
            logits: float32 [n, vocab_size].
            token_ids: the prompt's next token, for each index of the logits.
            num_top_tokens: how many of the most likely tokens to return besides.
        """
        index = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
        return gather_logprobs(logits.log_softmax(dim=1), index, num_top_tokens)

    @torch.inference_mode()
    def argmax_tokens(self, logits: torch.Tensor) -> list[int]:
        """Return the most likely token for each index of ``logits`` [n, vocab_size]; -1 if the logits are not finite.

        It is the token that ``sample`` chooses for a greedy sequence without logit filters.
        """
        best, token_ids = argmax_rows(logits)
        found: list[int] = token_ids.masked_fill_(~best.isfinite(), NO_TOKEN).tolist()
        return found

    def warm_up_prompt_logprobs(self, logits: torch.Tensor) -> None:
        """Compute as many log-probabilities from ``logits`` [n, vocab_size] as requests can ask for."""
        self.prompt_logprobs(logits, [0] * len(logits), [MAX_LOGPROBS] * len(logits))

    def warm_up(self, num_sequences: int) -> None:
        """Sample ``num_sequences`` sequences once, with every parameter that takes memory."""
        # Equal logits, and more allowed tokens than top-p has candidates, so that it sorts the vocabulary.
        logits = torch.zeros(num_sequences, self._vocab_size, device=self._device)
        params = SamplingParams(
            temperature=0.5,
            top_p=0.99,
            min_p=0.01,
            min_tokens=1,
            logprobs=MAX_LOGPROBS,
            repetition_penalty=1.1,
            frequency_penalty=0.1,
            presence_penalty=0.1,
            logit_bias={0: 1.0},
            bad_words_token_ids=((0, 0, 0, 0),),
            allowed_token_ids=list(range(min(2 * self._num_candidates, self._vocab_size))),
        )
        groups = [
            SequenceGroup(
                EngineRequest("warm-up", [0], params),
                arrival=0,
                root=0,
                stop_token_ids=frozenset({1}),
                max_total_tokens=2,
                seed=index,
            )
            for index in range(num_sequences)
        ]
        sequences = [group.sequences[0] for group in groups]
        words = -(-self._vocab_size // 32)
        bitmask = torch.full((num_sequences, words), -1, dtype=torch.int32, device=self._device)
        self.sample(logits, sequences, (list(range(num_sequences)), bitmask))
        self.reset()

    def _batch_of(self, sequences: Sequence_[Sequence]) -> SamplingBatch:
        batch, self._batch = self._batch, None  # not kept if building or advancing fails
        if batch is None or not batch.advance(sequences):
            batch = SamplingBatch(sequences, self._vocab_size, self._device, self._num_candidates)
        self._batch = batch
        return batch

    def _search(self, logits: torch.Tensor, batch: SamplingBatch) -> dict[int, tuple[list[int], list[float]]]:
        if not batch.beam_indices:
            return {}
        logprobs = logits.index_select(0, batch.beam_indices_on_device).log_softmax(dim=1)
        if batch.beam_min_tokens is not None:
            batch.beam_min_tokens.apply(logprobs)
        values, token_ids = top_tokens(logprobs, max(batch.num_beam_tokens))
        found = zip(batch.beam_indices, batch.num_beam_tokens, token_ids.tolist(), values.tolist(), strict=True)
        return {index: (ids[:count], scores[:count]) for index, count, ids, scores in found}

    @staticmethod
    def _logprobs(
        raw: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch, batch_size: int
    ) -> list[TokenLogprobs | None]:
        gathered = gather_logprobs(raw, tokens[batch.logprob_indices_on_device], batch.num_logprobs)
        logprobs: list[TokenLogprobs | None] = [None] * batch_size
        for index, one in zip(batch.logprob_indices, gathered, strict=True):
            logprobs[index] = one
        return logprobs


def _finish(
    token_ids: list[int],
    logprobs: list[TokenLogprobs | None] | None,
    beams: dict[int, tuple[list[int], list[float]]],
) -> SampledTokens:
    """Return the sampled tokens, with the sequences that failed."""
    invalid = {index for index, (_, scores) in beams.items() if not isfinite(scores[0])}
    if min(token_ids) == NO_TOKEN:
        invalid.update(index for index, token_id in enumerate(token_ids) if token_id == NO_TOKEN)
        token_ids = [max(token_id, 0) for token_id in token_ids]
    for index, one in enumerate(logprobs or ()):
        if one is not None and isnan(next(iter(one.values())).logprob):
            invalid.add(index)  # a NaN that a mask hid from the choice
            token_ids[index] = 0
    for index in beams:
        token_ids[index] = NO_TOKEN
    return SampledTokens(token_ids, logprobs, beams, dict.fromkeys(sorted(invalid), NO_CHOICE))
