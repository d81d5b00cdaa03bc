"""What the operations of base.py must compute, as plainly as torch allows. Tests compare with it; it is slow.

The functions that choose do it for every row, and return the tokens. Those that change logits do it in place.
"""

from __future__ import annotations

import torch

from kernels.sampling.base import ANY_TOKEN, NO_TOKEN, Limits
from kernels.sampling.exact_math import noisy_logits, scores_of, total_weights, weights_of

__all__ = [
    "add_biases",
    "apply_bitmask",
    "argmax",
    "draw",
    "forbid_tokens",
    "forbid_words",
    "penalise_counts",
    "penalise_repetition",
    "truncated_draw",
]


def add_biases(logits: torch.Tensor, indices: torch.Tensor, token_ids: torch.Tensor, biases: torch.Tensor) -> None:
    """Compute `SamplingOps.add_biases`."""
    logits[indices, token_ids] += biases


def forbid_tokens(logits: torch.Tensor, indices: torch.Tensor, token_ids: torch.Tensor, missing: torch.Tensor) -> None:
    """Compute `SamplingOps.forbid_tokens`."""
    logits[indices[missing > 0], token_ids[missing > 0]] += -torch.inf


def forbid_words(
    logits: torch.Tensor,
    indices: torch.Tensor,
    token_ids: torch.Tensor,
    words: torch.Tensor,
    owners: torch.Tensor,
    tails: torch.Tensor,
) -> None:
    """Compute `SamplingOps.forbid_words`."""
    is_forbidden = ((words == tails[owners]) | (words == ANY_TOKEN)).all(dim=1)
    logits[indices[is_forbidden], token_ids[is_forbidden]] += -torch.inf


def penalise_repetition(
    logits: torch.Tensor, indices: torch.Tensor, seen: torch.Tensor, penalties: torch.Tensor
) -> None:
    """Compute `SamplingOps.penalise_repetition`."""
    x = logits[indices]
    logits[indices] = torch.where(seen, torch.where(x > 0, x / penalties, x * penalties), x)


def penalise_counts(
    logits: torch.Tensor, indices: torch.Tensor, counts: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor
) -> None:
    """Compute `SamplingOps.penalise_counts`."""
    x = logits[indices]
    logits[indices] = torch.where(counts > 0, x - frequency * counts - presence, x)


def apply_bitmask(logits: torch.Tensor, indices: torch.Tensor | None, bitmask: torch.Tensor) -> None:
    """Compute `SamplingOps.apply_bitmask`."""
    is_allowed = ((bitmask[:, :, None] >> torch.arange(32)) & 1).flatten(1)[:, : logits.shape[1]].bool()
    rows = torch.arange(len(logits)) if indices is None else indices
    logits[rows] = logits[rows].masked_fill(~is_allowed, -torch.inf)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Compute `SamplingOps.argmax`."""
    tokens = logits.argmax(dim=1)
    is_possible = ~logits.isnan().any(dim=1) & logits.amax(dim=1).isfinite()
    return tokens.where(is_possible, NO_TOKEN)


def draw(logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Compute `SamplingOps.draw`."""
    return argmax(noisy_logits(logits, temperatures, keys))


def truncated_draw(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, limits: Limits
) -> torch.Tensor:
    """Compute `SamplingOps.truncated_draw` by sorting."""
    noisy = noisy_logits(logits, temperatures, keys)
    scores = scores_of(logits, temperatures)
    ordered, order = scores.sort(dim=1, descending=True, stable=True)
    is_kept = torch.arange(logits.shape[1], device=logits.device) < limits.top_k
    mass = (weights_of(ordered) * is_kept).cumsum(dim=1)
    is_whole = limits.top_k >= logits.shape[1]
    whole = torch.where(is_whole, total_weights(logits, temperatures), mass[:, -1:])
    is_kept[:, 1:] &= mass[:, :-1] < limits.top_p.double() * whole
    is_kept &= ordered >= limits.floors
    kept = torch.empty_like(is_kept).scatter_(1, order, is_kept)
    return argmax(noisy.masked_fill(~kept, -torch.inf) + scores.amax(dim=1, keepdim=True))
