"""Gathering rows of activations or embeddings, in C (csrc/linear/gather.h)."""

from __future__ import annotations

import torch

from kernels.cpu.library import require
from kernels.cpu.linear import PackedLinear, WeightKind

__all__ = ["gather_packed_rows", "gather_rows"]


def gather_rows(table: torch.Tensor, rows: torch.Tensor, multiplier: float = 1.0) -> torch.Tensor:
    """Return rows of a table [any, width], float32 or bfloat16, times ``multiplier`` as float32 [len(rows), width].

    Torch's own indexing would wake its threads, which then spin for milliseconds on the cores that compute the layers.

    Args:
        table: contiguous, on the CPU.
        rows: int64, the rows' indices.

    Raises:
        IndexError: if the table lacks one of them.
    """
    assert table.device.type == rows.device.type == "cpu"
    assert table.dtype in (torch.float32, torch.bfloat16)
    assert rows.dtype == torch.int64
    assert table.is_contiguous()
    assert rows.is_contiguous()
    num_rows, width = table.shape
    gathered = torch.empty(len(rows), width)
    is_bf16 = table.dtype == torch.bfloat16
    if not require().pagoda_gather_rows(
        gathered.data_ptr(), table.data_ptr(), is_bf16, num_rows, rows.data_ptr(), len(rows), width, multiplier
    ):
        raise _missing(rows, num_rows)
    return gathered


def gather_packed_rows(table: PackedLinear, rows: torch.Tensor, multiplier: float = 1.0) -> torch.Tensor:
    """Return rows of packed weights, of any kind but int8, times ``multiplier`` as float32 [len(rows), in_features].

    So a head that shares its weights with the embedding serves as both.

    Args:
        table: whose outputs are the rows.
        rows: int64, the rows' indices.

    Raises:
        IndexError: if the table lacks one of them.
    """
    assert table.kind is not WeightKind.INT8
    assert rows.dtype == torch.int64
    assert rows.is_contiguous()
    gathered = torch.empty(len(rows), table.in_features)
    if not require().pagoda_gather_packed_rows(
        gathered.data_ptr(), table.c_weight, rows.data_ptr(), len(rows), multiplier
    ):
        raise _missing(rows, table.out_features)
    return gathered


def _missing(rows: torch.Tensor, num_rows: int) -> IndexError:
    return IndexError(f"rows {int(rows.min())} to {int(rows.max())} are wanted of a table of {num_rows}")
