"""The noise is the hash that it should be, and distributed as Gumbel noise is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from engine.sampling.noise import as_uint64, noise_keys
from kernels.sampling.exact_math import gumbel_noise
from tests.engine.sampling.batches import VOCAB_SIZE, chi_square


def keys_of(seeds: Any, positions: Any) -> torch.Tensor:
    return torch.from_numpy(noise_keys(as_uint64(seeds), np.array(positions, dtype=np.uint64)))


def reference_noise(keys: list[int], vocab_size: int) -> list[float]:
    """MurmurHash3's finaliser on Python's integers, one number at a time."""
    first, second = (key % 2**32 for key in keys)
    noise = []
    for token in range(vocab_size):
        x = (token * 0x9E3779B1 + first) % 2**32
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x + second) % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        x ^= x >> 16
        noise.append(-math.log(-math.log(((x >> 9) + 0.5) / 2**23)))
    return noise


def test_noise_is_the_hash_it_says_it_is() -> None:
    keys = keys_of([0, -5, 2**63 - 1], [1, 2, 10**6])
    noise = gumbel_noise(keys, torch.arange(VOCAB_SIZE, dtype=torch.int32))
    for row in range(3):
        assert torch.allclose(noise[row], torch.tensor(reference_noise(keys[row].tolist(), VOCAB_SIZE)), atol=1e-5)


def test_noise_is_gumbel_and_uncorrelated_over_seeds_positions_and_tokens() -> None:
    pairs = [(seed, position) for seed in range(-20, 20) for position in range(40)]
    noise = gumbel_noise(keys_of(*zip(*pairs, strict=True)), torch.arange(64, dtype=torch.int32))
    grid = torch.exp(-torch.exp(-noise)).double().reshape(40, 40, 64).numpy()  # back to uniform
    counts = np.histogram(grid, bins=50, range=(0, 1))[0].tolist()
    assert chi_square(counts, [1 / 50] * 50) < 99
    for axis in range(3):
        for shift in (1, 2):
            correlation = np.corrcoef(grid.ravel(), np.roll(grid, shift, axis=axis).ravel())[0, 1]
            assert abs(correlation) < 0.015, (axis, shift)  # 102,400 numbers: a standard deviation is 0.003


def test_extreme_noise_is_finite() -> None:
    keys = keys_of(range(16), [0] * 16)
    assert gumbel_noise(keys, torch.arange(150_000, dtype=torch.int32)).isfinite().all()
