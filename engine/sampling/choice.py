"""Choosing a token from a row of logits: the likeliest, a draw, or a draw from the likeliest few.

Each chooser serves the rows of a batch that are alike, so that nobody pays for what only others ask for, and which one
serves a row depends on its own parameters alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Sequence_

import numpy as np
import torch

from engine.sampling.filters import column
from engine.sampling.noise import as_uint64, gumbel_noise, noise_keys
from engine.sampling.ranking import likeliest
from engine.sequence import Sequence
from kernels.argmax import argmax_rows
from kernels.cpu import sampling as cpu_sampling

__all__ = ["Chooser", "Draw", "Greedy", "TruncatedDraw", "build_choosers"]


class Chooser(ABC):
    """Chooses a token for some rows.

    Args:
        rows: of the batch; all of it if there are as many as ``sequences`` has.
        sequences: the batch.
    """

    def __init__(self, rows: Sequence_[int], sequences: Sequence_[Sequence], device: torch.device) -> None:
        # int64 [n], or None: all rows of the batch
        self._rows = None if len(rows) == len(sequences) else column(rows, torch.int64, device)

    def advance(self) -> None:  # noqa: B027  (the likeliest token does not depend on the position)
        """Every sequence has one more token."""

    def choose(self, logits: torch.Tensor, tokens: torch.Tensor, best: torch.Tensor) -> None:
        """Write the rows' tokens, int64 [num_rows], and how good they are: a finite number unless nothing can come."""
        picked = logits if self._rows is None else logits.index_select(0, self._rows)
        values, token_ids = self._choose(picked)
        if self._rows is None:
            tokens.copy_(token_ids)
            best.copy_(values)
        else:
            tokens.index_copy_(0, self._rows, token_ids)
            best.index_copy_(0, self._rows, values)

    @abstractmethod
    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best value of each row and its token id."""


class Greedy(Chooser):
    """The likeliest token."""

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return argmax_rows(logits)


class Draw(Chooser):
    """A draw from all tokens, or from those that min_p leaves."""

    def __init__(self, rows: Sequence_[int], sequences: Sequence_[Sequence], device: torch.device) -> None:
        super().__init__(rows, sequences, device)
        self._device = device
        served = [sequences[row] for row in rows]
        self._temperature = column([[s.params.temperature] for s in served], torch.float32, device)
        # Off is -inf. No token is likelier than the likeliest, whose scaled logit is 0.
        min_p = np.array([[s.params.min_p] for s in served], dtype=np.float32)
        with np.errstate(divide="ignore"):
            self._floor = column(np.log(min_p), torch.float32, device) if min_p.any() else None
        self._seeds = as_uint64([s.seed for s in served])
        self._positions = np.array([s.num_tokens for s in served], dtype=np.uint64)

    def advance(self) -> None:
        self._positions += np.uint64(1)

    def _keys(self) -> torch.Tensor:
        return column(noise_keys(self._seeds, self._positions), torch.int32, self._device)

    def _scale(self, logits: torch.Tensor) -> torch.Tensor:
        # Relative to the likeliest, or a tiny temperature would make several logits infinite.
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
    """A draw from the tokens that top_k, top_p and min_p leave.

    Top-k keeps the k likeliest; top-p then keeps the fewest of those whose renormalised mass reaches p; min-p keeps
    what is at least min_p times as likely as the likeliest. The likeliest token always stays. Of equally likely tokens
    the smaller id is the likelier.

    Nearly always the tokens left are few, so the likeliest few are looked at first, and a row is sorted only if they
    fall short of it.
    """

    def __init__(
        self,
        rows: Sequence_[int],
        sequences: Sequence_[Sequence],
        device: torch.device,
        vocab_size: int,
        num_candidates: int,
    ) -> None:
        super().__init__(rows, sequences, device)
        self._num_candidates = num_candidates
        params = [sequences[row].params for row in rows]
        top_k = [[p.top_k if 0 < p.top_k < vocab_size else vocab_size] for p in params]
        self._top_k = column(top_k, torch.int64, device)
        # Off is infinite: the rounded sum of all mass may reach 1 before the last token.
        self._top_p = column([[p.top_p if p.top_p < 1.0 else np.inf] for p in params], torch.float32, device)

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self._keys()
        scores, token_ids, log_totals = self._candidates(logits)
        num_candidates = scores.shape[1]
        ranks = torch.arange(num_candidates, device=scores.device)
        # The mass of each candidate: of what top-k leaves, where that is all among them, else of the whole row.
        scores.masked_fill_(ranks >= self._top_k, -torch.inf)
        all_there = self._top_k <= num_candidates
        mass = torch.where(all_there, scores.softmax(dim=1), (scores - log_totals).exp()).cumsum(dim=1)
        _cut(scores, mass, self._top_p)
        if self._floor is not None:
            scores.masked_fill_(scores < self._floor, -torch.inf)
        values, index = gumbel_noise(keys, token_ids.int()).add_(scores).max(dim=1, keepdim=True)
        chosen, values = token_ids.gather(1, index).squeeze(1), values.squeeze(1)
        short = (~(all_there | (mass[:, -1:] >= self._top_p))).flatten().nonzero().flatten()
        if short.numel():
            scaled = (logits[short] - logits[short].amax(dim=1, keepdim=True)).div_(self._temperature[short])
            values[short], chosen[short] = self._choose_sorted(scaled, short, keys[short])
        return values, chosen

    def _candidates(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the scores and ids of the likeliest tokens, and the logarithm of the mass of all scores, [n, 1]."""
        if cpu_sampling.can_sample(logits):
            return cpu_sampling.top_candidates(logits, self._temperature, self._num_candidates)
        scaled = self._scale(logits)
        return *likeliest(scaled, self._num_candidates), scaled.logsumexp(dim=1, keepdim=True)

    def _choose_sorted(
        self, scaled: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ordered, order = scaled.sort(dim=1, descending=True, stable=True)
        ordered.masked_fill_(torch.arange(scaled.shape[1], device=scaled.device) >= self._top_k[rows], -torch.inf)
        _cut(ordered, ordered.softmax(dim=1).cumsum(dim=1), self._top_p[rows])
        kept = torch.empty_like(ordered).scatter_(1, order, ordered)
        return self._draw(kept, None if self._floor is None else self._floor[rows], keys)


def _cut(ordered: torch.Tensor, mass: torch.Tensor, top_p: torch.Tensor) -> None:
    """Exclude in place what comes behind the top_p of ``mass``, the running sum of the tokens' probabilities."""
    ordered[:, 1:].masked_fill_(mass[:, :-1] >= top_p, -torch.inf)


def build_choosers(
    sequences: Sequence_[Sequence], vocab_size: int, device: torch.device, num_candidates: int
) -> list[Chooser]:
    """Return choosers that serve each row once, except those of beams, which nobody draws."""
    greedy, plain, truncated = [], [], []
    for row, sequence in enumerate(sequences):
        params = sequence.params
        if params.uses_beam_search:
            continue
        if params.is_greedy:
            greedy.append(row)
        elif params.top_p < 1.0 or 0 < params.top_k < vocab_size:
            truncated.append(row)
        else:
            plain.append(row)
    choosers: list[Chooser] = []
    if greedy:
        choosers.append(Greedy(greedy, sequences, device))
    if plain:
        choosers.append(Draw(plain, sequences, device))
    if truncated:
        choosers.append(TruncatedDraw(truncated, sequences, device, vocab_size, num_candidates))
    return choosers
