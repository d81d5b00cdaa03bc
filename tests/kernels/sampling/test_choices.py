"""The most likely token and the draw from all tokens: the reference's, and the C kernels', token for token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.cpu import sampling as cpu_sampling
from kernels.cpu.argmax import argmax_rows
from kernels.sampling import reference
from kernels.sampling.base import NO_TOKEN, Limits, SamplingOps
from tests.kernels.sampling.rows import random_keys, random_temperatures, rows_of_every_kind

WIDTHS = [1, 2, 31, 2048, 2049, 6000]


def _tokens(batch_size: int, launch: Callable[[torch.Tensor], None], device: torch.device) -> torch.Tensor:
    tokens = torch.full((batch_size,), 77, device=device)
    launch(tokens)
    return tokens.cpu()


@pytest.mark.parametrize("width", WIDTHS)
def test_argmax(width: int, ops: SamplingOps, kernel_device: torch.device, random: torch.Generator) -> None:
    rows = rows_of_every_kind(width, random)
    tokens = _tokens(40, lambda to: ops.argmax(to, rows.to(kernel_device), None), kernel_device)
    assert torch.equal(tokens, reference.argmax(rows))
    values, by_c = argmax_rows(rows)
    assert torch.equal(tokens, by_c.where(values.isfinite(), NO_TOKEN))
    assert (tokens == NO_TOKEN).sum() == 7


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("width", WIDTHS)
def test_draw(width: int, seed: int, ops: SamplingOps, kernel_device: torch.device) -> None:
    random = torch.Generator().manual_seed(seed)
    rows, keys = rows_of_every_kind(width, random), random_keys(40, random)
    temperatures = random_temperatures(40, random)
    arguments = [tensor.to(kernel_device) for tensor in (temperatures, keys)]
    tokens = _tokens(40, lambda to: ops.draw(to, rows.to(kernel_device), None, *arguments), kernel_device)
    assert torch.equal(tokens, reference.draw(rows, temperatures, keys))
    if cpu_sampling.can_sample(rows):
        values, by_c = cpu_sampling.draw(rows, temperatures, None, keys)
        assert torch.equal(tokens, by_c.where(values.isfinite(), NO_TOKEN))


def test_of_equal_noisy_logits_the_smallest_id_is_drawn(ops: SamplingOps, kernel_device: torch.device) -> None:
    """In one part of the tokens and in two; the temperature makes the noise vanish."""
    pairs = torch.tensor([[0, 1], [5, 18], [30, 2090], [2050, 2099]])
    rows = torch.zeros(4, 2100).scatter_(1, pairs, 7.5).to(kernel_device)
    temperatures = torch.full((4, 1), 1e-30, device=kernel_device)
    keys = random_keys(4, torch.Generator().manual_seed(0)).to(kernel_device)
    k, p, floors = (torch.full((4, 1), value, device=kernel_device) for value in (5, 0.9, -torch.inf))
    for launch in (
        lambda to: ops.argmax(to, rows, None),
        lambda to: ops.draw(to, rows, None, temperatures, keys),
        lambda to: ops.truncated_draw(to, rows, None, temperatures, keys, Limits(k, p, floors)),
    ):
        assert torch.equal(_tokens(4, launch, kernel_device), pairs[:, 0])


def test_chosen_rows_of_wider_logits(ops: SamplingOps, kernel_device: torch.device, random: torch.Generator) -> None:
    logits = torch.randn(6, 5001, generator=random).to(kernel_device)[:, :4097]  # `.to` would copy a slice densely
    rows, indices = logits.cpu(), torch.tensor([4, 0, 3])
    temperatures, keys = random_temperatures(3, random), random_keys(3, random)
    at = indices.to(kernel_device)
    tokens = _tokens(6, lambda to: ops.argmax(to, logits, at), kernel_device)
    expected = torch.full((6,), 77)
    expected[indices] = rows[indices].argmax(dim=1)
    assert torch.equal(tokens, expected)
    tokens = _tokens(
        6, lambda to: ops.draw(to, logits, at, temperatures.to(kernel_device), keys.to(kernel_device)), kernel_device
    )
    expected[indices] = reference.draw(rows[indices], temperatures, keys)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("batch_size", [0, 3])
def test_no_rows(ops: SamplingOps, kernel_device: torch.device, batch_size: int) -> None:
    """Neither a batch without rows nor one whose rows another method serves changes a token."""
    logits, tokens = torch.zeros(batch_size, 9, device=kernel_device), torch.full((batch_size,), 7).to(kernel_device)
    indices = torch.empty(0, dtype=torch.int64, device=kernel_device) if batch_size else None
    column = torch.empty(0, 1, device=kernel_device)
    keys = torch.empty(0, 2, dtype=torch.int32, device=kernel_device)
    ops.argmax(tokens, logits, indices)
    ops.draw(tokens, logits, indices, column, keys)
    ops.truncated_draw(tokens, logits, indices, column, keys, Limits(column.long(), column, column))
    assert tokens.tolist() == [7] * batch_size
