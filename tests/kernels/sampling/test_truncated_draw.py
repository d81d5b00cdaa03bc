"""Draws from what top-k, top-p and min-p keep: the reference's, and the CPU's, token for token."""

from __future__ import annotations

import pytest
import torch

from kernels.sampling import reference
from kernels.sampling.base import NO_TOKEN, Limits, SamplingOps
from tests.kernels.sampling.rows import random_keys, random_limits, random_temperatures, rows_of_every_kind

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # scores at a tiny temperature
OFF = torch.inf


def _draw(
    ops: SamplingOps,
    device: torch.device,
    rows: torch.Tensor,
    indices: torch.Tensor | None,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    limits: Limits,
) -> torch.Tensor:
    """Return the tokens, int64 [len(rows)], and 77 for rows that are not served."""
    tokens = torch.full((len(rows),), 77, device=device)
    at = None if indices is None else indices.to(device)
    columns = (column.to(device) for column in (limits.top_k, limits.top_p, limits.floors))
    ops.truncated_draw(tokens, rows.to(device), at, temperatures.to(device), keys.to(device), Limits(*columns))
    return tokens.cpu()


def _check(
    ops: SamplingOps,
    device: torch.device,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    limits: Limits,
    seed: int = 0,
) -> torch.Tensor:
    """Compare with the reference, and return the tokens."""
    keys = random_keys(len(rows), torch.Generator().manual_seed(seed))
    tokens = _draw(ops, device, rows, None, temperatures, keys, limits)
    assert torch.equal(tokens, reference.truncated_draw(rows, temperatures, keys, limits))
    return tokens


def _limits(num_rows: int, top_k: int, top_p: float = OFF, floor: float = -OFF) -> Limits:
    def column(value: float) -> torch.Tensor:
        return torch.full((num_rows, 1), value)

    return Limits(column(top_k).long(), column(top_p), column(floor))


@pytest.mark.parametrize("width", [1, 33, 700, 3000])
def test_random_limits(width: int, ops: SamplingOps, kernel_device: torch.device, random: torch.Generator) -> None:
    rows, temperatures = rows_of_every_kind(width, random), random_temperatures(40, random)
    tokens = _check(ops, kernel_device, rows, temperatures, random_limits(40, width, random))
    assert (tokens == NO_TOKEN).sum() == 7


@pytest.mark.parametrize("width", [2, 64, 65, 129])
def test_more_random_limits(width: int, ops: SamplingOps, kernel_device: torch.device) -> None:
    random = torch.Generator().manual_seed(width)
    rows, temperatures = rows_of_every_kind(width, random), random_temperatures(40, random)
    _check(ops, kernel_device, rows, temperatures, random_limits(40, width, random), width)


@pytest.mark.parametrize(
    ("limits", "num_kept"),
    [((7,), 7), ((300, 0.25), 75), ((300, 0.1), 30), ((8, 0.5), 4), ((8, 0.51), 5), ((300, OFF, 0.0), 300), ((1,), 1)],
)
def test_equal_logits_are_kept_by_id(
    limits: tuple[float, ...], num_kept: int, ops: SamplingOps, kernel_device: torch.device
) -> None:
    rows = torch.full((12, 300), 3.25)
    tokens = _check(ops, kernel_device, rows, torch.ones(12, 1), _limits(12, int(limits[0]), *limits[1:]))
    assert tokens.max() < num_kept
    if num_kept > 1:
        assert len(tokens.unique()) > 1


def test_top_p_keeps_equal_logits_of_which_top_k_keeps_all(ops: SamplingOps, kernel_device: torch.device) -> None:
    """Of the many equal ones below, top-k keeps one; that must not limit how many of the highest top-p keeps."""
    rows, highest = torch.zeros(8, 300), [3, 100, 101, 299]
    rows[:, highest] = 10.0
    tokens = _check(ops, kernel_device, rows, torch.ones(8, 1), _limits(8, 5, 0.99))
    assert set(tokens.tolist()) == set(highest)


def test_equal_logits_at_the_end_of_top_p(ops: SamplingOps, kernel_device: torch.device) -> None:
    """One token has half the mass, and of the 500 others some are kept: those with the smallest ids."""
    rows = torch.zeros(12, 501)
    rows[:, 250] = torch.log(torch.tensor(500.0))
    tokens = _check(ops, kernel_device, rows, torch.ones(12, 1), _limits(12, 501, 0.6))
    assert set(tokens.tolist()) - set(range(105)) <= {250}


def test_min_p_does_not_change_the_share_of_top_p(ops: SamplingOps, kernel_device: torch.device) -> None:
    rows = torch.randn(12, 400, generator=torch.Generator().manual_seed(1))
    _check(ops, kernel_device, rows, torch.ones(12, 1), _limits(12, 100, 0.9, -1.0))
    _check(ops, kernel_device, rows, torch.ones(12, 1), _limits(12, 400, 0.9, -1.0))


def test_chosen_rows_of_wider_logits(ops: SamplingOps, kernel_device: torch.device, random: torch.Generator) -> None:
    logits = torch.randn(6, 601, generator=random).to(kernel_device)[:, :500]  # `.to` would copy a slice densely
    indices, arguments = torch.tensor([4, 0, 3]), (torch.ones(3, 1), random_keys(3, random), _limits(3, 20, 0.9))
    expected = torch.full((6,), 77)
    expected[indices] = reference.truncated_draw(logits.cpu()[indices], *arguments)
    assert torch.equal(_draw(ops, kernel_device, logits, indices, *arguments), expected)
