"""Sampler: from logits to tokens.

Sampling is a pure function of (logits, parameters, seed, position). It does not depend on the other sequences of the
batch, on earlier samples, or on the replica. ``filters`` changes the logits, ``choosers`` chooses a token from them,
and ``noise`` makes a random choice reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from functools import partial

import torch

from engine.request import EngineRequest
from engine.sampling.batch import SamplingBatch
from engine.sampling.choosers import NO_TOKEN
from engine.sampling.pending import PendingTokens
from engine.sampling.ranking import PendingLogprobs, gather_logprobs, top_tokens
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SampledTokens
from engine.sequence import Sequence, SequenceGroup
from engine.structured_outputs.bitmask import apply_bitmask
from kernels.device_copy import wait_for_device
from kernels.sampling.select import select_sampling_ops

__all__ = ["NO_TOKEN", "NUM_CANDIDATES", "Sampler", "choose_tokens"]

NUM_CANDIDATES = 1024


class Sampler:
    """Chooses the tokens of a batch.

    Args:
        vocab_size: width of the logits.
        device: device of the logits.
        num_candidates: how many of the most likely tokens top-p tries before it sorts the vocabulary; torch only.
    """

    def __init__(self, vocab_size: int, device: torch.device, *, num_candidates: int = NUM_CANDIDATES) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._num_candidates = num_candidates
        self._ops = select_sampling_ops(device.type)
        self._batch: SamplingBatch | None = None

    def reset(self) -> None:
        """Forget the last batch, so that the next one is built from its sequences."""
        self._batch = None

    @torch.inference_mode()
    def start(
        self,
        logits: torch.Tensor,
        sequences: GenericSequence[Sequence],
        grammar: tuple[list[int], torch.Tensor] | None = None,
    ) -> PendingTokens:
        """Choose a token for each sequence; for a beam, find the most likely tokens. Does not wait for the device.

        Args:
            logits: float32 [batch_size, vocab_size]; overwritten, and read again by ``PendingTokens.finish``.
            sequences: the batch, at least one; all different.
            grammar: indices of the batch, and their bitmasks of allowed tokens, int32 [n, ceil(vocab_size / 32)].

        Returns:
            The token ids: -1 for beams, and 0 for sequences that failed because their logits hold a NaN or +inf or
            because every token is forbidden. A failure does not affect other sequences. Log-probabilities are those of
            the model's own logits; tokens that min_tokens forbids to a beam are at -inf.
        """
        batch = self._batch_of(sequences)
        beams = _search(logits, batch)
        raw_logprobs = None
        if batch.logprob_indices:
            raw_logprobs = logits.index_select(0, batch.logprob_indices_on_device).log_softmax(dim=1)
        tokens = choose_tokens(batch, logits, grammar)
        return PendingTokens(batch, logits, tokens, raw_logprobs, beams)

    def sample(
        self,
        logits: torch.Tensor,
        sequences: GenericSequence[Sequence],
        grammar: tuple[list[int], torch.Tensor] | None = None,
    ) -> SampledTokens:
        """Do what ``start`` does, and wait for the tokens."""
        if not sequences:
            return SampledTokens([])
        pending = self.start(logits, sequences, grammar)
        wait_for_device(self._device)
        return pending.finish(partial(wait_for_device, self._device))

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top_tokens: GenericSequence[int]
    ) -> PendingLogprobs:
        """Find log-probabilities of prompt tokens. Does not wait for the device.

        Args:
            logits: float32 [n, vocab_size].
            token_ids: int64 [n], on the device: the prompt's next token, for each index of the logits.
            num_top_tokens: how many of the most likely tokens to find in addition; -1 for all.
        """
        return gather_logprobs(logits.log_softmax(dim=1), token_ids, num_top_tokens)

    def warm_up_prompt_logprobs(self, logits: torch.Tensor, max_logprobs: int) -> None:
        """Compute ``max_logprobs`` log-probabilities for each index of ``logits`` [n, vocab_size]; -1 for all."""
        token_ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        self.prompt_logprobs(logits, token_ids, [max_logprobs] * len(logits))

    def warm_up_kernels(self, logits: torch.Tensor) -> None:
        """Compile the kernels of a GPU, for logits [n, vocab_size] as steps have them."""
        if self._ops is not None:
            self._ops.warm_up(logits)

    def warm_up(self, num_sequences: int, max_logprobs: int) -> None:
        """Sample ``num_sequences`` sequences once, with every parameter that takes memory."""
        # Equal logits, and more allowed tokens than top-p has candidates: a CPU then sorts the vocabulary.
        logits = torch.zeros(num_sequences, self._vocab_size, device=self._device)
        params = SamplingParams(
            temperature=0.5,
            top_p=0.99,
            min_p=0.01,
            min_tokens=1,
            logprobs=max_logprobs,
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

    def _batch_of(self, sequences: GenericSequence[Sequence]) -> SamplingBatch:
        batch, self._batch = self._batch, None  # not kept if building or advancing fails
        if batch is None or not batch.advance(sequences):
            batch = SamplingBatch(sequences, self._vocab_size, self._device, self._num_candidates, batch)
        self._batch = batch
        return batch


def choose_tokens(
    batch: SamplingBatch, logits: torch.Tensor, grammar: tuple[list[int], torch.Tensor] | None
) -> torch.Tensor:
    """Return the token of each sequence as the choosers write it, int64 [batch_size], and 0 for beams.

    Args:
        batch: the parameters.
        logits, grammar: as of ``Sampler.start``.
    """
    for logit_filter in batch.filters:
        logit_filter.apply(logits)
    if grammar is not None:
        apply_bitmask(logits, *grammar)  # last, so that no filter can allow a token again
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    for chooser in batch.choosers:
        chooser.choose(logits, tokens)
    return tokens


def _search(logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the scores and ids of the most likely tokens of each beam, both [num_beams, k]; None without beams."""
    if not batch.beam_indices:
        return None
    logprobs = logits.index_select(0, batch.beam_indices_on_device).log_softmax(dim=1)
    if batch.beam_min_tokens is not None:
        batch.beam_min_tokens.apply(logprobs)
    return top_tokens(logprobs, max(batch.num_beam_tokens))
