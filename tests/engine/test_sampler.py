"""The sampler: filters against a plain reference, draws against exact probabilities, and purity."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from engine.sampler import SamplingBatch, filter_logits, gumbel_noise, noise_keys, sample
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

VOCAB_SIZE = 50
CPU = torch.device("cpu")


def make_sequence(seed: int = 0, num_tokens: int = 4, **params: Any) -> Sequence:
    return Sequence(
        "request",
        [1] * num_tokens,
        SamplingParams(**params),
        arrival=0,
        root=0,
        stop_token_ids=frozenset({7}),
        max_total_tokens=100,
        seed=seed,
    )


def reference_support(logits: list[float], params: SamplingParams) -> set[int]:
    """Return the tokens that may be drawn, by the definitions, one row at a time."""
    scaled = [value / params.temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = [math.exp(scaled[i] - scaled[order[0]]) for i in order]
    total, mass, kept = sum(weights), 0.0, []
    for token, weight in zip(order, weights, strict=True):
        if kept and params.top_p < 1.0 and mass / total >= params.top_p:
            break
        kept.append(token)
        mass += weight
    return {i for i in kept if math.exp(scaled[i] - scaled[order[0]]) >= params.min_p}


def test_filters_keep_what_the_definitions_say() -> None:
    rng = random.Random(0)
    params = [
        SamplingParams(
            temperature=rng.choice([0.3, 1.0, 1.7]),
            top_k=rng.choice([-1, 0, 1, 5, 49, 50, 80]),
            top_p=rng.choice([1.0, 0.9, 0.5, 0.01]),
            min_p=rng.choice([0.0, 0.0, 0.1, 1.0]),
        )
        for _ in range(200)
    ]
    logits = torch.randn(200, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    sequences = [make_sequence(**{name: getattr(p, name) for name in ("temperature", "top_k", "top_p", "min_p")})
                 for p in params]  # fmt: skip
    batch = SamplingBatch.build(sequences, VOCAB_SIZE, CPU)
    filtered = filter_logits(logits / batch.temperature[:, None], batch)
    for row, one in enumerate(params):
        kept = set((filtered[row] > -math.inf).nonzero().flatten().tolist())
        assert kept == reference_support(logits[row].tolist(), one), one


def chi_square(counts: list[int], probabilities: list[float]) -> float:
    total = sum(counts)
    return sum((c - total * p) ** 2 / (total * p) for c, p in zip(counts, probabilities, strict=True) if p > 0)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.05}])
def test_draws_follow_the_exact_distribution(params: dict[str, Any]) -> None:
    """20,000 seeds at one position; the statistic exceeds 99 with 49 degrees of freedom once in 30,000 runs."""
    draws = 20_000
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 1.5
    batch = SamplingBatch.build([make_sequence(seed=seed, **params) for seed in range(draws)], VOCAB_SIZE, CPU)
    tokens = sample(logits.repeat(draws, 1), batch)
    one = SamplingParams(**params)
    support = reference_support(logits[0].tolist(), one)
    weights = [math.exp(float(x) / one.temperature) if i in support else 0.0 for i, x in enumerate(logits[0])]
    probabilities = [weight / sum(weights) for weight in weights]
    counts = torch.bincount(tokens, minlength=VOCAB_SIZE).tolist()
    assert all(p > 0 or c == 0 for c, p in zip(counts, probabilities, strict=True))
    statistic = chi_square(counts, probabilities)
    print(f"{params}: chi square {statistic:.1f} over {len(support)} tokens")
    assert statistic < 99


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(32, VOCAB_SIZE, generator=generator) * 2
    options: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.5},
    ]  # fmt: skip
    sequences = [make_sequence(seed=row, num_tokens=row + 1, **options[row % len(options)]) for row in range(32)]
    together = sample(logits.clone(), SamplingBatch.build(sequences, VOCAB_SIZE, CPU)).tolist()
    alone = [
        sample(logits[row : row + 1].clone(), SamplingBatch.build([sequence], VOCAB_SIZE, CPU)).item()
        for row, sequence in enumerate(sequences)
    ]
    assert together == alone


def test_greedy_takes_the_likeliest_and_ignores_the_seed() -> None:
    logits = torch.randn(8, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    sequences = [make_sequence(seed=row, temperature=0.0) for row in range(8)]
    tokens = sample(logits.clone(), SamplingBatch.build(sequences, VOCAB_SIZE, CPU))
    assert torch.equal(tokens, logits.argmax(dim=1))


def test_no_stop_token_before_min_tokens() -> None:
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 7] = 100.0  # 7 is the sequences' stop token
    sequences = [make_sequence(temperature=0.0, min_tokens=3) for _ in range(3)]
    for sequence, num_output in zip(sequences, (0, 2, 3), strict=True):
        sequence.token_ids += [9] * num_output
    tokens = sample(logits, SamplingBatch.build(sequences, VOCAB_SIZE, CPU)).tolist()
    assert tokens[0] != 7
    assert tokens[1] != 7
    assert tokens[2] == 7


def test_a_tiny_temperature_is_greedy_and_not_the_first_of_many_infinities() -> None:
    logits = torch.tensor([[5.0, 10.0, -3.0, 9.99]])
    for temperature in (1e-30, 1e-300):
        assert sample(logits.clone(), SamplingBatch.build([make_sequence(temperature=temperature)], 4, CPU)).item() == 1


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
    keys = torch.from_numpy(noise_keys([0, -5, 2**63 - 1], [1, 2, 10**6]))
    noise = gumbel_noise(keys, VOCAB_SIZE)
    for row in range(3):
        assert torch.allclose(noise[row], torch.tensor(reference_noise(keys[row].tolist(), VOCAB_SIZE)), atol=1e-5)


def test_noise_is_gumbel_and_uncorrelated_over_seeds_positions_and_tokens() -> None:
    pairs = [(seed, position) for seed in range(-20, 20) for position in range(40)]
    noise = gumbel_noise(torch.from_numpy(noise_keys(*zip(*pairs, strict=True))), 64)
    grid = torch.exp(-torch.exp(-noise)).double().reshape(40, 40, 64).numpy()  # back to uniform
    counts = np.histogram(grid, bins=50, range=(0, 1))[0].tolist()
    assert chi_square(counts, [1 / 50] * 50) < 99
    for axis in range(3):
        for shift in (1, 2):
            correlation = np.corrcoef(grid.ravel(), np.roll(grid, shift, axis=axis).ravel())[0, 1]
            assert abs(correlation) < 0.015, (axis, shift)  # 102,400 numbers: a standard deviation is 0.003


def test_extreme_noise_is_finite() -> None:
    keys = torch.from_numpy(noise_keys(range(64), [0] * 64))
    assert gumbel_noise(keys, 150_000).isfinite().all()
