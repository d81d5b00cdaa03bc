"""Noise that is a pure function of (seed, position, token): what makes sampling reproducible.

It is standard Gumbel noise (the Gumbel-max trick, Gumbel 1954): the likeliest token after adding it to the logits is a
draw from their softmax. The noise of token v is a hash of the row's seed, the position of the token to come, and v. No
generator has state, so the same seed gives the same tokens whatever else is in the batch, after a preemption and on
another replica. Another batch changes logits in their last bits; that changes a draw only where two noisy logits are as
close as that, whereas inverting a cumulative sum would move all its boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["as_uint64", "gumbel_noise", "noise_keys"]


def as_uint64(seeds: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return int64 seeds in the form that ``noise_keys`` takes."""
    return np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64)


def noise_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
    """Return two 32-bit keys per (seed, position), int32 [rows, 2], by SplitMix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        z = seeds
        # Hash the seed before the position is added: seeds 1, 2, 3 at positions 3, 2, 1 must not meet.
        for step in (np.uint64(0), positions):
            z = z + (step + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z = z ^ (z >> np.uint64(31))
    return z.view(np.int32).reshape(-1, 2)


def _as_int32(constant: int) -> int:
    return constant - 2**32 if constant >= 2**31 else constant


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float32 [rows, tokens], from int32 ``keys`` [rows, 2].

    ``token_ids`` is int32, [tokens] or [rows, tokens]. Each number comes from MurmurHash3's 32-bit finaliser, keyed
    before and within; products wrap.
    """
    x = token_ids * _as_int32(0x9E3779B1)
    x = x + keys[:, :1]
    x ^= (x >> 16) & 0xFFFF  # the mask makes the shift a logical one
    x *= _as_int32(0x85EBCA6B)
    x += keys[:, 1:]
    x ^= (x >> 13) & 0x7FFFF
    x *= _as_int32(0xC2B2AE35)
    x ^= (x >> 16) & 0xFFFF
    # 23 bits and a half: in float32 exactly, and never 0 or 1.
    uniform = ((x >> 9) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()
