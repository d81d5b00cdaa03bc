"""The sampling kernels against what torch computes for the same definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import ranking
from kernels.cpu import reference
from kernels.cpu.sampling import draw, top_k, truncated_draw
from kernels.sampling import reference as slow_draws
from kernels.sampling.base import NO_TOKEN, Limits
from kernels.sampling.exact_math import UNITS_OF_WEIGHT, noisy_logits, weights_of
from tests.kernels.sampling.rows import random_limits, random_temperatures, rows_of_every_kind

SPECIAL = [-torch.inf, -2.0, -0.0, 0.0, 1.5, 3.0e38, torch.inf]


def likeliest_by_torch(monkeypatch: pytest.MonkeyPatch, scores: torch.Tensor, k: int) -> torch.Tensor:
    with monkeypatch.context() as patched:
        patched.setattr(ranking.cpu_sampling, "can_sample", lambda rows: False)
        return ranking.top_tokens(scores, k)[1]


@pytest.mark.parametrize("k", [1, 2, 20, 1024, 5000])
@pytest.mark.parametrize("width", [1, 17, 1000, 151936])
def test_top_k_equals_torch(k: int, width: int, monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    scores = torch.randn(3, width).bfloat16().float()  # many are equal
    values, indices = top_k(scores, k)
    assert torch.equal(indices, likeliest_by_torch(monkeypatch, scores, k))
    assert torch.equal(values, reference.top_k(scores, k)[0])
    assert torch.equal(values, scores.gather(1, indices))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=120), st.integers(1, 130))
def test_equal_scores_are_ordered_by_index(row: list[float], k: int) -> None:
    _, indices = top_k(torch.tensor([row]), k)

    def priority(index: int) -> tuple[float, float, int]:
        return -row[index], -math.copysign(1, row[index]), index  # the order of the bits: +0 is higher than -0

    assert indices[0].tolist() == sorted(range(len(row)), key=priority)[:k]


def random_keys(rows: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (rows, 2)).int()


def draw_like_the_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, limits: Limits, keys: torch.Tensor
) -> torch.Tensor:
    """Compare with the reference, and return the tokens."""
    values, tokens = truncated_draw(logits, temperatures, keys, limits)
    tokens[~values.isfinite()] = NO_TOKEN
    assert torch.equal(tokens, slow_draws.truncated_draw(logits, temperatures, keys, limits))
    is_token, of_tokens = tokens != NO_TOKEN, tokens[:, None].clamp(min=0)
    noisy = noisy_logits(logits.gather(1, of_tokens), temperatures, keys, of_tokens.int())[:, 0]
    assert torch.equal(values[is_token], noisy[is_token])
    return tokens


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # scores at a tiny temperature
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("width", [1, 15, 33, 700, 3000, 40_000])
def test_truncated_draws_equal_the_reference(width: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    rows, temperatures = rows_of_every_kind(width, random), random_temperatures(40, random)
    tokens = draw_like_the_reference(rows, temperatures, random_limits(40, width, random), random_keys(40))
    assert (tokens == NO_TOKEN).sum() == 7


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 3.0])
def test_top_p_of_flat_rows_keeps_as_many_as_it_needs(scale: float, top_p: float) -> None:
    rows = torch.randn(8, 20_000, generator=torch.Generator().manual_seed(1)) * scale
    limits = Limits(torch.full((8, 1), 20_000), torch.full((8, 1), top_p), torch.full((8, 1), -torch.inf))
    draw_like_the_reference(rows, torch.ones(8, 1), limits, random_keys(8))


def test_weights_are_probabilities() -> None:
    scores = torch.cat((-(10 ** torch.linspace(-30, 2.5, 20_000)), torch.tensor([0.0, -0.0, -torch.inf])))
    exact = scores.double().exp()
    difference = weights_of(scores) / UNITS_OF_WEIGHT - exact
    assert (difference.abs() <= 2e-7 * exact + 1 / UNITS_OF_WEIGHT).all()
    assert weights_of(scores)[-3:].tolist() == [UNITS_OF_WEIGHT, UNITS_OF_WEIGHT, 0.0]


@pytest.mark.parametrize("width", [1, 15, 16, 17, 50, 3000, 151936])
@pytest.mark.parametrize("floor", [None, -3.0])
def test_a_draw_is_the_highest_noisy_logit(width: int, floor: float | None) -> None:
    rows = 200 if width <= 3000 else 4
    logits, temperatures, keys = torch.randn(rows, width) * 3, torch.rand(rows, 1) + 0.2, random_keys(rows)
    floors = None if floor is None else torch.full((rows, 1), floor)
    values, tokens = draw(logits, temperatures, floors, keys)
    noisy = reference.draw(logits, temperatures, floors, keys)
    assert torch.equal(values, noisy.amax(dim=1))
    assert torch.equal(tokens, noisy.argmax(dim=1))


def test_of_equal_noisy_logits_the_smallest_id_is_drawn() -> None:
    """At every two ids, in the same lane of a vector or in others; the temperature makes the noise vanish."""
    pairs = torch.combinations(torch.arange(50))
    rows, temperatures = torch.zeros(len(pairs), 50).scatter_(1, pairs, 7.5), torch.full((len(pairs), 1), 1e-30)
    keys, floors = random_keys(len(pairs)), torch.full((len(pairs), 1), -1.0)
    assert (noisy_logits(rows, temperatures, keys).gather(1, pairs) == 7.5).all()
    drawn = [draw(rows, temperatures, floor, keys)[1] for floor in (None, floors)]
    for k, p in ((5, torch.inf), (5, 0.9), (50, 0.9), (50, torch.inf)):
        limits = Limits(torch.full((len(pairs), 1), k), torch.full((len(pairs), 1), p), floors)
        drawn.append(truncated_draw(rows, temperatures, keys, limits)[1])
    for tokens in drawn:
        assert torch.equal(tokens, pairs[:, 0])


def test_top_p_keeps_equal_logits_of_which_top_k_keeps_all() -> None:
    """Of the many equal ones below, top-k keeps one; that must not limit how many of the highest top-p keeps."""
    rows, highest = torch.zeros(100, 700), [3, 100, 101, 699]
    rows[:, highest] = 10.0
    limits = Limits(torch.full((100, 1), 5), torch.full((100, 1), 0.99), torch.full((100, 1), -torch.inf))
    tokens = draw_like_the_reference(rows, torch.ones(100, 1), limits, random_keys(100))
    assert set(tokens.tolist()) == set(highest)


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("index", [0, 20, 49])
def test_a_row_with_nan_or_infinity_gives_no_finite_score(bad: float, index: int) -> None:
    logits, temperatures = torch.randn(3, 50), torch.ones(3, 1)
    logits[1, index] = bad
    # The second row may be one without min_p beside others with it.
    for floors in (None, torch.tensor([[-1.0], [-torch.inf], [-1.0]]), torch.full((3, 1), -1.0)):
        values, _ = draw(logits, temperatures, floors, torch.ones(3, 2, dtype=torch.int32))
        assert values.isfinite().tolist() == [True, False, True]
    limits = Limits(torch.full((3, 1), 5), torch.full((3, 1), 0.9), torch.full((3, 1), -torch.inf))
    values, _ = truncated_draw(logits, temperatures, torch.ones(3, 2, dtype=torch.int32), limits)
    assert values.isfinite().tolist() == [True, False, True]


def test_a_row_without_allowed_tokens_gives_no_finite_score() -> None:
    logits = torch.full((1, 50), -torch.inf)
    keys = torch.ones(1, 2, dtype=torch.int32)
    for floors in (None, torch.full((1, 1), -torch.inf), torch.full((1, 1), -1.0)):
        assert not draw(logits, torch.ones(1, 1), floors, keys)[0].isfinite()
    limits = Limits(torch.full((1, 1), 5), torch.full((1, 1), 0.9), torch.full((1, 1), -torch.inf))
    assert not truncated_draw(logits, torch.ones(1, 1), keys, limits)[0].isfinite()
