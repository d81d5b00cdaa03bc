"""Gumbel noise as a pure function of (seed, position, token), which makes sampling reproducible.

The Gumbel-max trick (Gumbel, 1954): add standard Gumbel noise to the logits, and the argmax is a draw from their
softmax. The noise of token v is a hash of the sequence's seed, the position of the next token, and v. There is no
generator with a state, so the same seed gives the same tokens in any batch, after a preemption, and on another replica.

In another batch the logits differ in their last bits. That changes a draw only if two noisy logits are equally close;
inverting a cumulative sum would move all its boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["as_uint64", "gumbel_noise", "noise_keys"]


def as_uint64(seeds: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return int64 seeds as the uint64 array that ``noise_keys`` takes."""
    return np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64)


def noise_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
    """Return two 32-bit keys per (seed, position), int32 [n, 2], by SplitMix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        z = seeds
        # Hash the seed before the position is added: seeds 1, 2, 3 at positions 3, 2, 1 must not collide.
        for step in (np.uint64(0), positions):
            z = z + (step + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z = z ^ (z >> np.uint64(31))
    return z.view(np.int32).reshape(-1, 2)


def _as_int32(constant: int) -> int:
    return constant - 2**32 if constant >= 2**31 else constant


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float32 [n, tokens], from int32 ``keys`` [n, 2].

    ``token_ids`` is int32, [tokens] or [n, tokens]. Each number comes from MurmurHash3's 32-bit finaliser, keyed
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
    # 23 bits plus a half: exact in float32, and never 0 or 1.
    uniform = ((x >> 9) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()
