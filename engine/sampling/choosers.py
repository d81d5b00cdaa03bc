"""Choosers: pick the next token from the logits, as the most likely one or as a random draw.

Each chooser serves the sequences of a batch that need the same work, so a greedy sequence does not pay for its
neighbours' top-p. A sequence's own parameters alone decide which chooser serves it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Sequence_

import numpy as np
import torch

from engine.device_copy import to_device
from engine.sampling.noise import as_uint64, gumbel_noise, noise_keys
from engine.sampling.ranking import top_tokens
from engine.sequence import Sequence
from kernels.argmax import argmax_rows
from kernels.cpu import sampling as cpu_sampling

__all__ = ["NO_TOKEN", "UNDECIDED", "Chooser", "Draw", "Greedy", "TruncatedDraw", "build_choosers", "only_finite"]

# What stands for a token id:
NO_TOKEN = -1  # the logits hold a NaN or infinity, or every token is forbidden
UNDECIDED = -2  # the candidates do not suffice: see TruncatedDraw


class Chooser(ABC):
    """Chooses the next token of some sequences of a batch.

    Args:
        indices: which sequences of the batch this chooser serves, by index.
        sequences: the whole batch.
        device: device of the logits.
    """

    def __init__(self, indices: Sequence_[int], sequences: Sequence_[Sequence], device: torch.device) -> None:
        # int64 [n]; None for the whole batch
        self._indices = None if len(indices) == len(sequences) else to_device(indices, torch.int64, device)

    def advance(self) -> None:  # noqa: B027  (a greedy choice does not depend on the position)
        """Advance by one step: every sequence has one more token."""

    def choose(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write the chosen tokens to ``tokens``, int64 [batch_size], or NO_TOKEN or UNDECIDED; change no logits."""
        if self._indices is None:
            tokens.copy_(only_finite(*self._choose(logits)))
        else:
            picked = logits.index_select(0, self._indices)
            tokens.index_copy_(0, self._indices, only_finite(*self._choose(picked)))

    @abstractmethod
    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chosen tokens' scores, finite if a token could be chosen, and their ids; both [n]."""


def only_finite(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the token ids, changed in place to NO_TOKEN where the score is not finite."""
    return token_ids.masked_fill_(scores - scores != 0, NO_TOKEN)  # isfinite is four kernels on a GPU


class Greedy(Chooser):
    """The most likely token."""

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return argmax_rows(logits)


class Draw(Chooser):
    """A draw from all tokens, or from those that min_p keeps."""

    def __init__(self, indices: Sequence_[int], sequences: Sequence_[Sequence], device: torch.device) -> None:
        super().__init__(indices, sequences, device)
        self._device = device
        served = [sequences[index] for index in indices]
        self._temperature = to_device([[s.params.temperature] for s in served], torch.float32, device)
        # Off is -inf. The most likely token has the scaled logit 0.
        min_p = np.array([[s.params.min_p] for s in served], dtype=np.float32)
        with np.errstate(divide="ignore"):
            self._floor = to_device(np.log(min_p), torch.float32, device) if min_p.any() else None
        self._seeds = as_uint64([s.seed for s in served])
        self._positions = np.array([s.num_tokens for s in served], dtype=np.uint64)

    def advance(self) -> None:
        self._positions += np.uint64(1)

    def _keys(self) -> torch.Tensor:
        return to_device(noise_keys(self._seeds, self._positions), torch.int32, self._device)

    def _scale(self, logits: torch.Tensor) -> torch.Tensor:
        # Relative to the highest logit, or a tiny temperature would make several logits infinite.
        return (logits - logits.amax(dim=1, keepdim=True)).div_(self._temperature)

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if cpu_sampling.can_sample(logits):
            return cpu_sampling.draw(logits, self._temperature, self._floor, self._keys())
        return self._draw(self._scale(logits), self._floor, self._keys())

    @staticmethod
    def _draw(
        scaled: torch.Tensor, floor: torch.Tensor | None, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if floor is not None:
            scaled = scaled.masked_fill_(scaled < floor, -torch.inf)
        token_ids = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
        noisy = gumbel_noise(keys, token_ids).add_(scaled)
        chosen = noisy.argmax(dim=1)
        return noisy.gather(1, chosen[:, None]).squeeze(1), chosen


class TruncatedDraw(Draw):
    """A draw from the tokens that top_k, top_p and min_p keep.

    Top-k keeps the k most likely tokens. Top-p then keeps the fewest of these whose renormalised probabilities sum to
    at least p. Min-p keeps tokens that are at least min_p times as likely as the most likely one, which is always kept.
    Of equally likely tokens the smaller id counts as the more likely one.

    These are few tokens nearly always, so ``choose`` looks at ``num_candidates`` of them. Where the candidates'
    probabilities do not reach p, it leaves the sequence UNDECIDED, because only the device knows it at that time. Once
    the host knows it too, ``choose_sorted`` sorts the whole vocabulary for those sequences.
    """

    def __init__(
        self,
        indices: Sequence_[int],
        sequences: Sequence_[Sequence],
        device: torch.device,
        vocab_size: int,
        num_candidates: int,
    ) -> None:
        super().__init__(indices, sequences, device)
        self._num_candidates = num_candidates
        self._served = list(indices)
        params = [sequences[index].params for index in indices]
        top_k = [[p.top_k if 0 < p.top_k < vocab_size else vocab_size] for p in params]
        self._top_k = to_device(top_k, torch.int64, device)
        # Off is infinite: the rounded sum of all mass may reach 1 before the last token.
        self._top_p = to_device([[p.top_p if p.top_p < 1.0 else np.inf] for p in params], torch.float32, device)

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, token_ids, log_totals = self._candidates(logits)
        num_candidates = scores.shape[1]
        ranks = torch.arange(num_candidates, device=scores.device)
        # The probability of each candidate: among the tokens that top-k keeps if all these are candidates, else among
        # the whole vocabulary.
        scores.masked_fill_(ranks >= self._top_k, -torch.inf)
        has_all_top_k = self._top_k <= num_candidates
        mass = torch.where(has_all_top_k, scores.softmax(dim=1), (scores - log_totals).exp()).cumsum(dim=1)
        _cut(scores, mass, self._top_p)
        if self._floor is not None:
            scores.masked_fill_(scores < self._floor, -torch.inf)
        values, index = gumbel_noise(self._keys(), token_ids.int()).add_(scores).max(dim=1, keepdim=True)
        is_decided = has_all_top_k | (mass[:, -1:] >= self._top_p)
        chosen = token_ids.gather(1, index).masked_fill_(~is_decided, UNDECIDED)
        return values.squeeze(1), chosen.squeeze(1)

    def _candidates(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the scaled logits and ids of the most likely tokens, and the logsumexp of all logits, [n, 1]."""
        if cpu_sampling.can_sample(logits):
            return cpu_sampling.top_candidates(logits, self._temperature, self._num_candidates)
        scaled = self._scale(logits)
        return *top_tokens(scaled, self._num_candidates), scaled.logsumexp(dim=1, keepdim=True)

    def choose_sorted(self, logits: torch.Tensor, undecided: Sequence_[int]) -> torch.Tensor:
        """Choose the tokens of the sequences that ``choose`` left undecided in this step.

        Args:
            logits: as ``choose`` got them, [batch_size, vocab_size].
            undecided: indices of the batch, ascending.

        Returns:
            int64 [len(undecided)]; NO_TOKEN where none can be chosen.
        """
        own = to_device(np.searchsorted(self._served, undecided), torch.int64, self._device)
        logits = logits[to_device(undecided, torch.int64, self._device)]
        scaled = (logits - logits.amax(dim=1, keepdim=True)).div_(self._temperature[own])
        ordered, order = scaled.sort(dim=1, descending=True, stable=True)
        ordered.masked_fill_(torch.arange(scaled.shape[1], device=scaled.device) >= self._top_k[own], -torch.inf)
        _cut(ordered, ordered.softmax(dim=1).cumsum(dim=1), self._top_p[own])
        kept = torch.empty_like(ordered).scatter_(1, order, ordered)
        return only_finite(*self._draw(kept, None if self._floor is None else self._floor[own], self._keys()[own]))


def _cut(ordered: torch.Tensor, mass: torch.Tensor, top_p: torch.Tensor) -> None:
    """Exclude in place the tokens after the top_p of ``mass``, the running sum of the tokens' probabilities."""
    ordered[:, 1:].masked_fill_(mass[:, :-1] >= top_p, -torch.inf)


def build_choosers(
    sequences: Sequence_[Sequence], vocab_size: int, device: torch.device, num_candidates: int
) -> list[Chooser]:
    """Return choosers that serve every sequence of a batch but beams, which the beam search extends."""
    greedy, plain, truncated = [], [], []
    for index, sequence in enumerate(sequences):
        params = sequence.params
        if params.uses_beam_search:
            continue
        if params.is_greedy:
            greedy.append(index)
        elif params.top_p < 1.0 or 0 < params.top_k < vocab_size:
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
