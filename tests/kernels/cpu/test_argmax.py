"""The largest element of each row, in C and by torch, against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import argmax, reference
from kernels.cpu.argmax import argmax_rows


@pytest.fixture(params=["kernels", "torch"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(argmax, "library", lambda: None)


@pytest.mark.parametrize("width", [1, 2, 15, 16, 63, 64, 65, 128, 1000, 151936])
def test_equals_the_reference(width: int) -> None:
    rows = torch.randn(7, width)
    values, indices = argmax_rows(rows)
    expected_values, expected_indices = reference.argmax_rows(rows)
    assert torch.equal(indices, expected_indices)
    assert torch.equal(values, expected_values)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([-torch.inf, -1.0, 0.0, 2.0, torch.inf]), min_size=1, max_size=200))
def test_the_first_of_equal_elements_wins(row: list[float]) -> None:
    values, indices = argmax_rows(torch.tensor([row]))
    assert indices.item() == row.index(max(row))
    assert values.item() == max(row)


def test_of_two_equal_elements_the_first_wins_wherever_they_are() -> None:
    """Also in the same lane of a vector."""
    pairs = torch.combinations(torch.arange(200))
    rows = torch.zeros(len(pairs), 200).scatter_(1, pairs, 2.0)
    assert torch.equal(argmax_rows(rows)[1], pairs[:, 0])


@pytest.mark.parametrize("index", [0, 1, 40, 63, 64, 100, 129])
def test_a_nan_is_found_at_any_index_and_changes_no_other_row(index: int) -> None:
    rows = torch.randn(3, 130)
    rows[1, index] = torch.nan
    values, indices = argmax_rows(rows)
    assert values.isnan().tolist() == [False, True, False]
    assert indices[0] == rows[0].argmax()


def test_part_of_wider_rows() -> None:
    rows = torch.randn(4, 100)
    values, indices = argmax_rows(rows[:, :50])
    assert torch.equal(indices, rows[:, :50].argmax(dim=1))
    assert torch.equal(values, rows[:, :50].amax(dim=1))
