"""PendingTokens: what a batch has sampled, on its way from the device to the host.

pending = sampler.start(logits, sequences)     the device samples, and copies to pinned memory
wait()                                         until the device is done: once a step
pending.finish(wait)                           tensors on the host become lists
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite, isnan

import torch

from engine.outputs import TokenLogprobs
from engine.sampling.batch import SamplingBatch
from engine.sampling.beam_search import Candidates
from engine.sampling.choosers import NO_TOKEN, UNDECIDED
from engine.sampling.ranking import gather_listed, gather_logprobs
from engine.scheduling.scheduler_output import SampledTokens
from kernels.device_copy import start_to_host, to_device

__all__ = ["PendingTokens"]

NO_CHOICE = "no token can be sampled: the logits hold a NaN or infinity, or every token is forbidden"


class PendingTokens:
    """The chosen tokens, their log-probabilities and the beams' candidates, not yet read by the host.

    Args:
        batch: the parameters. It may advance before ``finish``, to the next step.
        logits: float32 [batch_size, vocab_size], from which the tokens were chosen. Kept if a token may be undecided;
            they must then not change before ``finish``.
        tokens: int64 [batch_size], as the choosers wrote them: ``on_device``.
        raw_logprobs: the model's own log-probabilities of the batch's ``logprob_indices``, [n, vocab_size].
        beams: the scores and ids of the most likely tokens of the batch's ``beam_indices``, both [num_beams, k].
    """

    def __init__(
        self,
        batch: SamplingBatch,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        raw_logprobs: torch.Tensor | None,
        beams: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        self._batch = batch
        self._truncated_draw = batch.truncated_draw()
        # Elsewhere the memory is free for the next step, which may start before this one is finished.
        self._logits = None if self._truncated_draw is None else logits
        self._raw_logprobs = None if self._truncated_draw is None else raw_logprobs
        self.on_device = tokens
        self._tokens = start_to_host(tokens)
        self._logprobs = None
        if raw_logprobs is not None:
            own = tokens[batch.logprob_indices_on_device].clamp_(min=0)  # without a token, those of any token
            self._logprobs = gather_logprobs(raw_logprobs, own, batch.num_logprobs)
        self._listed = None
        if raw_logprobs is not None and (listed := batch.listed) is not None:
            rows = raw_logprobs.index_select(0, listed.indices_on_device)
            self._listed = gather_listed(rows, listed.token_ids, listed.counts)
        self._beams = None if beams is None else (start_to_host(beams[0]), start_to_host(beams[1]))

    @torch.inference_mode()
    def finish(self, wait: Callable[[], None]) -> SampledTokens:
        """Return the sampled tokens. The device must be done with what it was given so far.

        Args:
            wait: waits for the device; called if top-p needs the whole vocabulary for a sequence, which is rare.
        """
        token_ids: list[int] = self._tokens.tolist()
        if self._logprobs is None:
            logprobs = None
        else:
            logprobs = dict(zip(self._batch.logprob_indices, self._logprobs.to_lists(), strict=True))
        undecided = [index for index, token_id in enumerate(token_ids) if token_id == UNDECIDED]
        if undecided:
            self._decide(undecided, token_ids, logprobs or {}, wait)
        if logprobs is not None:
            self._add_listed(logprobs)
        in_order = None if logprobs is None else [logprobs.get(index) for index in range(len(token_ids))]
        sampled = _without_failed(token_ids, in_order, self._beam_candidates())
        sampled.resampled_on_host = undecided
        return sampled

    def _add_listed(self, logprobs: dict[int, TokenLogprobs]) -> None:
        """Add the tokens of ``logprob_token_ids``."""
        if self._listed is not None and self._batch.listed is not None:
            for position, listed in zip(self._batch.listed.indices, self._listed.to_lists(), strict=True):
                logprobs[self._batch.logprob_indices[position]].update(listed)

    def _decide(
        self,
        undecided: list[int],
        token_ids: list[int],
        logprobs: dict[int, TokenLogprobs],
        wait: Callable[[], None],
    ) -> None:
        """Choose the tokens that were left undecided; replace them in ``token_ids``, and their ``logprobs``."""
        assert self._truncated_draw is not None
        assert self._logits is not None
        tokens = self._truncated_draw.choose_sorted(self._logits, undecided)
        on_host, ranked = start_to_host(tokens), None
        with_logprobs = [index for index in undecided if index in logprobs]
        if with_logprobs and self._raw_logprobs is not None:
            rows = [self._batch.logprob_indices.index(index) for index in with_logprobs]
            own = to_device([undecided.index(index) for index in with_logprobs], torch.int64, tokens.device)
            raw = self._raw_logprobs.index_select(0, to_device(rows, torch.int64, tokens.device))
            num_logprobs = [self._batch.num_logprobs[row] for row in rows]
            ranked = gather_logprobs(raw, tokens[own].clamp_(min=0), num_logprobs)
        wait()
        for index, token_id in zip(undecided, on_host.tolist(), strict=True):
            token_ids[index] = token_id
        if ranked is not None:
            logprobs.update(zip(with_logprobs, ranked.to_lists(), strict=True))

    def _beam_candidates(self) -> dict[int, Candidates]:
        if self._beams is None:
            return {}
        scores, token_ids = self._beams
        ranked = zip(
            self._batch.beam_indices, self._batch.num_beam_tokens, token_ids.tolist(), scores.tolist(), strict=True
        )
        return {index: (ids[:count], own_scores[:count]) for index, count, ids, own_scores in ranked}


def _without_failed(
    token_ids: list[int], logprobs: list[TokenLogprobs | None] | None, beams: dict[int, Candidates]
) -> SampledTokens:
    """Return the sampled tokens, with the sequences that failed."""
    invalid = {index for index, (_, scores) in beams.items() if not isfinite(scores[0])}
    if min(token_ids) == NO_TOKEN:
        invalid.update(index for index, token_id in enumerate(token_ids) if token_id == NO_TOKEN)
        token_ids = [max(token_id, 0) for token_id in token_ids]
    for index, token_logprobs in enumerate(logprobs or ()):
        if token_logprobs is not None and isnan(next(iter(token_logprobs.values())).logprob):
            invalid.add(index)  # a NaN that a mask hid from the choice
            token_ids[index] = 0
    for index in beams:
        token_ids[index] = NO_TOKEN
    return SampledTokens(token_ids, logprobs, beams, dict.fromkeys(sorted(invalid), NO_CHOICE))
