"""Sampler: logits to tokens.

Sampling is a pure function of (logits, parameters, seed, position): it does not depend on what else is in the batch, on
what was sampled before it, or on the replica. Of sampling/, noise.py says how a draw is one, logit_filters.py what
changes the logits first, and choice.py how a token is chosen from them.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from math import isfinite, isnan

import torch

from engine.outputs import TokenLogprobs
from engine.request import EngineRequest
from engine.sampling.batch import SamplingBatch
from engine.sampling.ranking import gather_logprobs, likeliest
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.scheduling.step import SampledTokens
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
        vocab_size: columns of the logits.
        device: where the logits are.
        num_candidates: how many of the likeliest tokens top-p looks at before it sorts the vocabulary.
    """

    def __init__(self, vocab_size: int, device: torch.device, *, num_candidates: int = NUM_CANDIDATES) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._num_candidates = num_candidates
        self._batch: SamplingBatch | None = None

    def reset(self) -> None:
        """Forget the last batch: the next one is built from its sequences. Never changes what is sampled."""
        self._batch = None

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        sequences: Sequence_[Sequence],
        grammar: tuple[list[int], torch.Tensor] | None = None,
    ) -> SampledTokens:
        """Choose a token for each row, or find the likeliest ones for a beam.

        Args:
            logits: float32 [rows, vocab_size]; may be altered.
            sequences: one per row; several rows may have equal logits, none the same sequence.
            grammar: rows, and int32 [len(rows), ceil(vocab_size / 32)] with a bit for each token that may come there.

        Returns:
            The tokens, -1 in rows of beams and 0 in those that failed, because the logits hold a NaN or +inf or because
            every token is forbidden: the other rows are as if these were not there. Log-probabilities are of the logits
            as the model gave them; what a beam may not say yet is at -inf.
        """
        if not sequences:
            return SampledTokens([])
        batch = self._batch_of(sequences)
        beams = self._search(logits, batch)
        raw = logits.index_select(0, batch.ranked_index).log_softmax(dim=1) if batch.ranked_rows else None
        for one in batch.filters:
            one.apply(logits)
        if grammar is not None:
            apply_bitmask(logits, *grammar)  # the last word: nothing that follows allows a token
        tokens = torch.zeros(len(sequences), dtype=torch.int64, device=logits.device)
        best = torch.zeros(len(sequences), device=logits.device)
        for chooser in batch.choosers:
            chooser.choose(logits, tokens, best)
        logprobs = None if raw is None else self._logprobs(raw, tokens, batch, len(sequences))
        token_ids: list[int] = tokens.masked_fill_(~best.isfinite(), NO_TOKEN).tolist()
        return _finish(token_ids, logprobs, beams)

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: torch.Tensor, token_ids: Sequence_[int], counts: Sequence_[int]
    ) -> list[TokenLogprobs]:
        """Return for each row of ``logits`` [rows, vocab_size] the log-probabilities of the prompt's token that comes
        next, of ``token_ids``, and of its ``counts`` likeliest."""
        index = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
        return gather_logprobs(logits.log_softmax(dim=1), index, counts)

    @torch.inference_mode()
    def argmax_tokens(self, logits: torch.Tensor) -> list[int]:
        """Return the likeliest token of each row of ``logits`` [rows, vocab_size], as ``sample`` takes it where nothing
        changes the logits; -1 where there is none."""
        best, token_ids = argmax_rows(logits)
        found: list[int] = token_ids.masked_fill_(~best.isfinite(), NO_TOKEN).tolist()
        return found

    def warm_up(self, num_rows: int) -> None:
        """Sample once with everything that takes memory in each of ``num_rows`` rows."""
        # Equal logits, and more tokens allowed than top-p looks at, so that it has to sort.
        logits = torch.zeros(num_rows, self._vocab_size, device=self._device)
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
                seed=row,
            )
            for row in range(num_rows)
        ]
        sequences = [group.sequences[0] for group in groups]
        words = -(-self._vocab_size // 32)
        bitmask = torch.full((num_rows, words), -1, dtype=torch.int32, device=self._device)
        self.sample(logits, sequences, (list(range(num_rows)), bitmask))
        self.reset()

    def _batch_of(self, sequences: Sequence_[Sequence]) -> SamplingBatch:
        batch, self._batch = self._batch, None  # forgotten if building or advancing fails
        if batch is None or not batch.advance(sequences):
            batch = SamplingBatch(sequences, self._vocab_size, self._device, self._num_candidates)
        self._batch = batch
        return batch

    def _search(self, logits: torch.Tensor, batch: SamplingBatch) -> dict[int, tuple[list[int], list[float]]]:
        if not batch.beam_rows:
            return {}
        logprobs = logits.index_select(0, batch.beam_index).log_softmax(dim=1)
        if batch.beam_min_tokens is not None:
            batch.beam_min_tokens.apply(logprobs)
        values, token_ids = likeliest(logprobs, max(batch.num_beam_tokens))
        rows = zip(batch.beam_rows, batch.num_beam_tokens, token_ids.tolist(), values.tolist(), strict=True)
        return {row: (ids[:count], scores[:count]) for row, count, ids, scores in rows}

    @staticmethod
    def _logprobs(
        raw: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch, num_rows: int
    ) -> list[TokenLogprobs | None]:
        gathered = gather_logprobs(raw, tokens[batch.ranked_index], batch.num_logprobs)
        logprobs: list[TokenLogprobs | None] = [None] * num_rows
        for row, one in zip(batch.ranked_rows, gathered, strict=True):
            logprobs[row] = one
        return logprobs


def _finish(
    token_ids: list[int],
    logprobs: list[TokenLogprobs | None] | None,
    beams: dict[int, tuple[list[int], list[float]]],
) -> SampledTokens:
    """Tell the rows in which nothing could be chosen from the others."""
    invalid = {row for row, (_, scores) in beams.items() if not isfinite(scores[0])}
    if min(token_ids) == NO_TOKEN:
        invalid.update(row for row, token_id in enumerate(token_ids) if token_id == NO_TOKEN)
        token_ids = [max(token_id, 0) for token_id in token_ids]
    for row, one in enumerate(logprobs or ()):
        if one is not None and isnan(next(iter(one.values())).logprob):
            invalid.add(row)  # a NaN that a mask hid from the choice
            token_ids[row] = 0
    for row in beams:
        token_ids[row] = NO_TOKEN
    return SampledTokens(token_ids, logprobs, beams, dict.fromkeys(sorted(invalid), NO_CHOICE))
