"""Biases, forbidden tokens, penalties and bitmasks: the reference's logits, bit for bit but for a NaN's payload."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from kernels.sampling import reference
from kernels.sampling.base import ANY_TOKEN, SamplingOps
from tests.kernels.sampling.rows import rows_of_every_kind

Check = Callable[..., None]
WIDTHS = [1, 31, 33, 2048, 2049, 5003]
NUM_ROWS = 40
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # +inf forbidden is NaN


def _logits(width: int, layout: str, random: torch.Generator) -> torch.Tensor:
    """Return logits [40, width], whose rows may be further apart."""
    rows = rows_of_every_kind(width, random)
    if layout == "contiguous":
        return rows
    padded = torch.full((NUM_ROWS, width + 29), 77.0)
    padded[:, :width] = rows
    return padded[:, :width]


@pytest.fixture(params=product(WIDTHS, ["contiguous", "padded"]), ids=str)
def logits(request: pytest.FixtureRequest, random: torch.Generator) -> torch.Tensor:
    return _logits(*request.param, random)


def _check(ops: SamplingOps, device: torch.device, name: str, logits: torch.Tensor, *arguments: Any) -> None:
    """Compare with the reference, in what lies between the rows too."""
    ours = logits.as_strided((len(logits), logits.stride(0)), logits.stride()).clone().to(device)
    expected = logits.clone()
    getattr(reference, name)(expected, *arguments)
    getattr(ops, name)(
        ours[:, : logits.shape[1]],
        *(argument if argument is None else argument.contiguous().to(device) for argument in arguments),
    )
    torch.testing.assert_close(ours[:, : logits.shape[1]].cpu(), expected, rtol=0, atol=0, equal_nan=True)
    assert bool((ours[:, logits.shape[1] :] == 77).all())


@pytest.fixture
def check(ops: SamplingOps, kernel_device: torch.device) -> Check:
    return partial(_check, ops, kernel_device)


def _pairs(width: int, count: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return different pairs of a row and a token: at most ``count``."""
    flat = torch.randperm(NUM_ROWS * width, generator=random)[:count]
    return flat // width, flat % width


def _some_rows(random: torch.Generator) -> torch.Tensor:
    return torch.randperm(NUM_ROWS, generator=random)[:23]


def test_listed_tokens(logits: torch.Tensor, check: Check, random: torch.Generator) -> None:
    width = logits.shape[1]
    for count in (0, 1, 127, 128, 1001):
        pairs = _pairs(width, count, random)
        biases = torch.randn(len(pairs[0]), generator=random) * 30
        biases[::7] = -torch.inf
        check("add_biases", logits, *pairs, biases)
        missing = torch.randint(-2, 3, pairs[0].shape, generator=random)
        check("forbid_tokens", logits, *pairs, missing)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_bad_words(length: int, check: Check, random: torch.Generator) -> None:
    """Of few different tokens, so that words match, and forbid a token that another one forbids too."""
    logits = _logits(33, "padded", random)
    for count in (0, 1, 300):
        rows = torch.randint(NUM_ROWS, (count,), generator=random)
        words = torch.randint(2, (count, length), generator=random)
        words[::3, : length // 2 + 1] = ANY_TOKEN
        tails = torch.randint(-2, 2, (NUM_ROWS, length), generator=random)
        last = torch.randint(33, (count,), generator=random)
        check("forbid_words", logits, rows, last, words, rows, tails)


def test_penalties(logits: torch.Tensor, check: Check, random: torch.Generator) -> None:
    for rows in (_some_rows(random), torch.arange(NUM_ROWS), torch.empty(0, dtype=torch.int64)):
        shape = (len(rows), logits.shape[1])
        seen = torch.rand(shape, generator=random) < 0.3
        factors = 0.5 + torch.rand(len(rows), 1, generator=random)
        check("penalise_repetition", logits, rows, seen, factors)
        counts = (torch.randint(5, shape, generator=random) * seen).int()
        counts[:, ::11] *= 1_000_003  # more than 24 bits, as no history has
        frequency, presence = (4 * torch.rand(2, len(rows), 1, generator=random) - 2).unbind()
        check("penalise_counts", logits, rows, counts, frequency, presence)


def test_bitmasks(logits: torch.Tensor, check: Check, random: torch.Generator) -> None:
    width = logits.shape[1]
    for rows in (_some_rows(random), None, torch.empty(0, dtype=torch.int64)):
        shape = (NUM_ROWS if rows is None else len(rows), -(-width // 32))
        bitmask = torch.randint(-(2**31), 2**31, shape, generator=random).int()
        bitmask[::4], bitmask[1::4] = 0, -1
        check("apply_bitmask", logits, rows, bitmask)
