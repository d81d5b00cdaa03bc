"""Choosers: pick the next token from the logits, as the most likely one or as a random draw.

Each chooser serves the sequences of a batch that need the same work, so a greedy sequence does not pay for its
neighbours' top-p. A sequence's own parameters alone decide which chooser serves it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.sampling.noise import as_uint64, noise_keys
from engine.sampling.ranking import top_tokens
from engine.sequence import Sequence
from kernels.cpu import sampling as cpu_sampling
from kernels.cpu.argmax import argmax_rows
from kernels.device_copy import to_device
from kernels.sampling.base import NO_TOKEN, Limits, SamplingOps
from kernels.sampling.exact_math import noisy_logits, scores_of, total_weights, weights_of
from kernels.sampling.select import select_sampling_ops

__all__ = ["NO_TOKEN", "UNDECIDED", "Chooser", "Draw", "Greedy", "TruncatedDraw", "build_choosers", "only_finite"]

UNDECIDED = -2  # stands for a token id like NO_TOKEN: the candidates do not suffice; see TruncatedDraw


class Chooser(ABC):
    """Chooses the next token of some sequences of a batch.

    Args:
        indices: which sequences of the batch this chooser serves, by index.
        sequences: the whole batch.
        device: device of the logits.
    """

    def __init__(
        self, indices: GenericSequence[int], sequences: GenericSequence[Sequence], device: torch.device
    ) -> None:
        # int64 [n]; None for the whole batch
        self._indices = None if len(indices) == len(sequences) else to_device(indices, torch.int64, device)
        self._ops = select_sampling_ops(device.type)

    def advance(self) -> None:  # noqa: B027  (a greedy choice does not depend on the position)
        """Advance by one step: every sequence has one more token."""

    def choose(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write the chosen tokens to ``tokens``, int64 [batch_size], or NO_TOKEN or UNDECIDED; change no logits."""
        if self._ops is not None:
            self._choose_by(self._ops, logits, tokens)
        elif self._indices is None:
            tokens.copy_(only_finite(*self._choose(logits)))
        else:
            picked = logits.index_select(0, self._indices)
            tokens.index_copy_(0, self._indices, only_finite(*self._choose(picked)))

    @abstractmethod
    def _choose_by(self, ops: SamplingOps, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Let the kernels of a GPU write the chosen tokens; no sequence is left UNDECIDED."""

    @abstractmethod
    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chosen tokens' scores, finite if a token could be chosen, and their ids; both [n]."""


def only_finite(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the token ids, changed in place to NO_TOKEN where the score is not finite."""
    return token_ids.masked_fill_(scores - scores != 0, NO_TOKEN)  # isfinite is four kernels on a GPU


class Greedy(Chooser):
    """The most likely token."""

    def _choose_by(self, ops: SamplingOps, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        ops.argmax(tokens, logits, self._indices)

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return argmax_rows(logits)


class Draw(Chooser):
    """A draw from all tokens; without the kernels of a GPU, also from those that min_p keeps."""

    def __init__(
        self, indices: GenericSequence[int], sequences: GenericSequence[Sequence], device: torch.device
    ) -> None:
        super().__init__(indices, sequences, device)
        self._device = device
        served = [sequences[index] for index in indices]
        self._temperature = to_device([[s.params.temperature] for s in served], torch.float32, device)
        # Off is -inf. The most likely token has the score 0.
        min_p = np.array([[s.params.min_p] for s in served], dtype=np.float32)
        with np.errstate(divide="ignore"):
            self._floor = to_device(np.log(min_p), torch.float32, device) if min_p.any() else None
        self._seeds = as_uint64([s.seed for s in served])
        self._positions = np.array([s.num_tokens for s in served], dtype=np.uint64)

    def advance(self) -> None:
        self._positions = self._positions + np.uint64(1)  # not in place: a step in flight may have a copy of this

    def _keys(self) -> torch.Tensor:
        return to_device(noise_keys(self._seeds, self._positions), torch.int32, self._device)

    def _choose_by(self, ops: SamplingOps, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        assert self._floor is None, "min_p is TruncatedDraw's on a GPU"
        ops.draw(tokens, logits, self._indices, self._temperature, self._keys())

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self._keys()
        if cpu_sampling.can_sample(logits):
            return cpu_sampling.draw(logits, self._temperature, self._floor, keys)
        noisy = noisy_logits(logits, self._temperature, keys)
        if self._floor is not None:
            scores = scores_of(logits, self._temperature)
            # Without a finite score no token can be chosen.
            noisy = noisy.masked_fill_(scores < self._floor, -torch.inf) + scores.amax(dim=1, keepdim=True)
        return argmax_rows(noisy)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The k most likely tokens of each row of logits, in order; of equal scores the smaller id comes first.

    Attributes:
        scores: (logit - the row's largest) / temperature, float32 [num_rows, k]; NaN if the largest is not finite.
        token_ids: int64 [num_rows, k].
        weights: e^score, as ``exact_math.weights_of`` returns it, float64 [num_rows, k].
        noisy: logit + temperature * Gumbel noise, float32 [num_rows, k].
        totals: of the weights of all tokens of the row, by ``exact_math.total_weights``, float64 [num_rows, 1].
    """

    scores: torch.Tensor
    token_ids: torch.Tensor
    weights: torch.Tensor
    noisy: torch.Tensor
    totals: torch.Tensor


class TruncatedDraw(Draw):
    """A draw from the tokens that top_k, top_p and min_p keep.

    Top-k keeps the k most likely tokens. Top-p then keeps the fewest of these whose renormalised probabilities sum to
    at least p. Min-p keeps tokens that are at least min_p times as likely as the most likely one, which is always kept.
    Of equally likely tokens the smaller id counts as the more likely one. Probabilities are rounded to whole units
    whose sums are exact (``weights_of``), so that all devices keep the same tokens.

    A GPU's kernels find them by bisection (kernels/sampling/triton/truncation.py), and a CPU's among the most likely
    ones (csrc/sampling/truncated_draw.c). In torch ``choose`` looks at the ``num_candidates`` most likely tokens,
    because nearly always only few are kept. Where the candidates' probabilities do not reach p, it leaves the sequence
    UNDECIDED, because only the device knows it at that time. Once the host knows it too, ``choose_sorted`` sorts the
    whole vocabulary for those sequences.
    """

    def __init__(
        self,
        indices: GenericSequence[int],
        sequences: GenericSequence[Sequence],
        device: torch.device,
        vocab_size: int,
        num_candidates: int,
    ) -> None:
        super().__init__(indices, sequences, device)
        self._num_candidates = num_candidates
        self._vocab_size = vocab_size
        self._served = list(indices)
        params = [sequences[index].params for index in indices]
        top_k = [[p.top_k if 0 < p.top_k < vocab_size else vocab_size] for p in params]
        top_p = [[p.top_p if p.top_p < 1.0 else np.inf] for p in params]
        floors = torch.full_like(self._temperature, -torch.inf) if self._floor is None else self._floor
        self._limits = Limits(to_device(top_k, torch.int64, device), to_device(top_p, torch.float32, device), floors)

    @property
    def may_be_undecided(self) -> bool:
        """Whether ``choose`` may leave a sequence UNDECIDED.

        Torch may and C does not; which of them computes is not known before the logits are.
        """
        return self._ops is None

    def _choose_by(self, ops: SamplingOps, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        ops.truncated_draw(tokens, logits, self._indices, self._temperature, self._keys(), self._limits)

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self._keys()
        if cpu_sampling.can_sample(logits):
            return cpu_sampling.truncated_draw(logits, self._temperature, keys, self._limits)
        candidates = self._candidates(logits, self._temperature, keys, self._num_candidates)
        return self._choose_from(candidates, self._limits)

    def choose_sorted(self, logits: torch.Tensor, undecided: GenericSequence[int]) -> torch.Tensor:
        """Choose the tokens of the sequences that ``choose`` left undecided in this step.

        Args:
            logits: as ``choose`` got them, [batch_size, vocab_size].
            undecided: indices of the batch, ascending.

        Returns:
            int64 [len(undecided)]; NO_TOKEN where none can be chosen.
        """
        own = to_device(np.searchsorted(self._served, undecided), torch.int64, self._device)
        logits = logits[to_device(undecided, torch.int64, self._device)]
        candidates = self._candidates(logits, self._temperature[own], self._keys()[own], self._vocab_size)
        limits = Limits(self._limits.top_k[own], self._limits.top_p[own], self._limits.floors[own])
        return only_finite(*self._choose_from(candidates, limits))

    @staticmethod
    def _candidates(logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, count: int) -> _Candidates:
        scores = scores_of(logits, temperature)
        highest, token_ids = top_tokens(scores, count)
        noisy = noisy_logits(logits.gather(1, token_ids), temperature, keys, token_ids.int())
        return _Candidates(highest, token_ids, weights_of(highest), noisy, total_weights(logits, temperature))

    def _choose_from(self, candidates: _Candidates, limits: Limits) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose among the candidates of each sequence."""
        top_k, scores, num_candidates = limits.top_k, candidates.scores, candidates.scores.shape[1]
        is_kept = torch.arange(num_candidates, device=scores.device) < top_k
        mass = (candidates.weights * is_kept).cumsum(dim=1)
        has_all_top_k, is_whole = top_k <= num_candidates, top_k >= self._vocab_size
        # Top-p is a share of what top-k keeps, which may be the whole vocabulary.
        enough = limits.top_p.double() * torch.where(is_whole, candidates.totals, mass[:, -1:])
        is_kept[:, 1:] &= mass[:, :-1] < enough
        is_kept &= scores >= limits.floors
        noisy = candidates.noisy.masked_fill(~is_kept, -torch.inf)
        values, index = noisy.max(dim=1, keepdim=True)
        is_decided = has_all_top_k | (is_whole & (mass[:, -1:] >= enough))
        chosen = candidates.token_ids.gather(1, index).masked_fill_(~is_decided, UNDECIDED)
        # Without a finite score no token can be chosen.
        return (values + scores[:, :1]).squeeze(1), chosen.squeeze(1)


def build_choosers(
    sequences: GenericSequence[Sequence], vocab_size: int, device: torch.device, num_candidates: int
) -> list[Chooser]:
    """Return choosers that serve every sequence of a batch except beams, which the beam search extends."""
    greedy, plain, truncated = [], [], []
    min_p_truncates = select_sampling_ops(device.type) is not None  # C and torch draw as fast with min_p
    for index, sequence in enumerate(sequences):
        params = sequence.params
        if params.uses_beam_search:
            continue
        if params.is_greedy:
            greedy.append(index)
        elif params.top_p < 1.0 or 0 < params.top_k < vocab_size or (params.min_p > 0.0 and min_p_truncates):
            truncated.append(index)
        else:
            plain.append(index)
    choosers: list[Chooser] = []
    if greedy:
        choosers.append(Greedy(greedy, sequences, device))
    if plain:
        choosers.append(Draw(plain, sequences, device))
    if truncated:
        choosers.append(TruncatedDraw(truncated, sequences, device, vocab_size, num_candidates))
    return choosers
