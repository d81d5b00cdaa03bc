"""Rows of logits, their keys and temperatures, for the tests of the sampling kernels."""

from __future__ import annotations

import torch

from kernels.sampling.base import Limits

__all__ = ["random_keys", "random_limits", "random_temperatures", "rows_of_every_kind"]


def random_keys(num_rows: int, random: torch.Generator) -> torch.Tensor:
    """Return keys of noise, int32 [num_rows, 2]."""
    return torch.randint(-(2**31), 2**31, (num_rows, 2), generator=random).int()


def random_temperatures(num_rows: int, random: torch.Generator) -> torch.Tensor:
    """Return temperatures, float32 [num_rows, 1]: ordinary ones, and now and then one that is almost 0."""
    return torch.tensor([0.3, 0.7, 1.0, 2.0, 1e-6, 1e-38])[torch.randint(6, (num_rows, 1), generator=random)]


def rows_of_every_kind(width: int, random: torch.Generator) -> torch.Tensor:
    """Return float32 [40, width]: smooth and rounded logits, equal ones, masked ones, and rows without a token."""
    rows = torch.randn(40, width, generator=random) * torch.tensor([0.1, 1.0, 3.0, 10.0] * 10)[:, None]
    rows[8:16] = rows[8:16].bfloat16().float()
    rows[16:20] = rows[16:20].round()  # few values, and 0 beside -0
    rows[20:22] = torch.tensor([[7.5], [0.0]])
    masked = torch.rand(8, width, generator=random) < torch.tensor([0.5, 0.99] * 4)[:, None]
    masked[:, width // 2] = False
    rows[24:32] = rows[24:32].masked_fill(masked, -torch.inf)
    rows[32] = -torch.inf
    for row, value in zip(range(33, 39), [torch.nan, -torch.nan, torch.inf] * 2, strict=True):
        rows[row, -1 if row % 2 else width // 3] = value
    return rows


def random_limits(num_rows: int, width: int, random: torch.Generator) -> Limits:
    """Return limits of every kind, and now and then none."""

    def column(options: list[float]) -> torch.Tensor:
        return torch.tensor(options)[torch.randint(len(options), (num_rows, 1), generator=random)]

    top_k = column([1, 2, 5, 20, 50, width - 1, width, width, width]).long().clamp(1, width)
    top_p = column([torch.inf, torch.inf, 0.99999994, 0.999, 0.95, 0.9, 0.5, 0.25, 0.1, 1e-30])
    return Limits(top_k, top_p, column([-torch.inf, -torch.inf, -torch.inf, 0.0, -0.05, -2.0, -10.0]))
