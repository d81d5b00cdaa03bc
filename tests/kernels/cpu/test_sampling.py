"""The sampling kernels against what torch computes for the same definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import ranking
from engine.sampling.noise import gumbel_noise
from kernels.cpu import reference
from kernels.cpu.sampling import draw, top_candidates, top_k

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


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 5.0])
def test_candidates_have_their_share_of_all_mass(temperature: float) -> None:
    logits = torch.randn(4, 3001) * 4
    scores, ids, log_totals = top_candidates(logits, torch.full((4, 1), temperature), 50)
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / temperature
    assert torch.allclose(scores, scaled.gather(1, ids), atol=1e-5)
    assert torch.allclose((scores - log_totals).exp(), scaled.softmax(dim=1).gather(1, ids), rtol=1e-4)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 50, 3000, 151936])
@pytest.mark.parametrize("floor", [None, -3.0])
def test_a_draw_is_the_highest_noisy_score(width: int, floor: float | None) -> None:
    rows = 200 if width <= 3000 else 4
    logits, temperatures = torch.randn(rows, width) * 3, torch.rand(rows, 1) + 0.2
    keys = torch.randint(-(2**31), 2**31, (rows, 2)).int()
    floors = None if floor is None else torch.full((rows, 1), floor)
    values, tokens = draw(logits, temperatures, floors, keys)
    noise = gumbel_noise(keys, torch.arange(width, dtype=torch.int32))
    noisy = reference.draw(logits, temperatures, floors, noise)
    assert torch.allclose(values, noisy.amax(dim=1), atol=1e-4)
    assert torch.allclose(noisy.gather(1, tokens[:, None]).squeeze(1), noisy.amax(dim=1), atol=1e-4)
    assert (tokens == noisy.argmax(dim=1)).float().mean() > 0.98  # nearly equal ones may swap


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("index", [0, 20, 49])
def test_a_row_with_nan_or_infinity_gives_no_finite_score(bad: float, index: int) -> None:
    logits, temperatures = torch.randn(3, 50), torch.ones(3, 1)
    logits[1, index] = bad
    values, _ = draw(logits, temperatures, None, torch.ones(3, 2, dtype=torch.int32))
    assert values.isfinite().tolist() == [True, False, True]
    scores, _, _ = top_candidates(logits, temperatures, 5)
    assert scores[:, 0].isfinite().tolist() == [True, False, True]


def test_a_row_without_allowed_tokens_gives_no_finite_score() -> None:
    logits = torch.full((1, 50), -torch.inf)
    assert not draw(logits, torch.ones(1, 1), None, torch.ones(1, 2, dtype=torch.int32))[0].isfinite()
    assert not top_candidates(logits, torch.ones(1, 1), 5)[0][0, 0].isfinite()
