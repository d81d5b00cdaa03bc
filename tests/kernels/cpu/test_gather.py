"""Gathering rows, against torch's indexing."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.gather import gather_packed_rows, gather_rows
from kernels.cpu.linear import PackedLinear, WeightKind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "count"), [(1, 3), (15, 1), (16, 40), (33, 7), (1024, 15), (1024, 16), (1000, 300)])
def test_equals_indexing(width: int, count: int, dtype: torch.dtype, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(width + count)
    table = torch.randn(50, width, generator=generator).to(dtype)
    rows = torch.randint(50, (count,), generator=generator)
    gathered = gather_rows(table, rows)
    assert gathered.dtype == torch.float32
    assert torch.equal(gathered, table[rows].float())
    assert torch.equal(gather_rows(table, rows, 3.3), table[rows].float() * 3.3)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(WeightKind.FLOAT32, torch.float32), (WeightKind.BFLOAT16, torch.bfloat16)]
)
@pytest.mark.parametrize(("width", "count"), [(1, 3), (15, 1), (16, 40), (33, 7), (1024, 15), (1000, 300)])
def test_packed_rows_are_what_was_packed(
    width: int, count: int, kind: WeightKind, dtype: torch.dtype, num_threads: int
) -> None:
    generator = torch.Generator().manual_seed(width + count)
    table = torch.randn(71, width, generator=generator).to(dtype)
    packed = PackedLinear(kind, width, 71)
    packed.set_weight(table)
    rows = torch.randint(71, (count,), generator=generator)
    assert torch.equal(gather_packed_rows(packed, rows), table[rows].float())
    assert torch.equal(gather_packed_rows(packed, rows, 3.3), gather_rows(table, rows, 3.3))


@pytest.mark.parametrize("row", [-1, 3])
def test_a_missing_row_is_rejected(row: int) -> None:
    with pytest.raises(IndexError, match="table of 3"):
        gather_rows(torch.randn(3, 8), torch.tensor([0, row, 2]))
    with pytest.raises(IndexError, match="table of 3"):
        gather_packed_rows(PackedLinear(WeightKind.FLOAT32, 8, 3), torch.tensor([0, row, 2]))


def test_no_rows() -> None:
    assert gather_rows(torch.randn(3, 8), torch.empty(0, dtype=torch.int64)).shape == (0, 8)
