"""The keys of Gumbel noise, which is a pure function of (seed, position, token): it makes sampling reproducible.

The Gumbel-max trick (Gumbel, 1954): add standard Gumbel noise, times the temperature, to the logits, and the argmax is
a draw from the softmax of the logits divided by the temperature. The noise of token v is a hash of the sequence's seed,
the position of the next token, and v: ``gumbel_noise`` in kernels/sampling/exact_math.py. There is no generator with a
state, so the same seed gives the same tokens in any batch, after a preemption, and on another replica.

In another batch the logits differ in their last bits. That changes a draw only if two noisy logits are equally close;
inverting a cumulative sum would move all its boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["as_uint64", "noise_keys"]


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
