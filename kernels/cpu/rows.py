"""Rows of activations by the C kernels (csrc/rows.h)."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu.library import pointer, require

__all__ = ["gather_rows"]


def gather_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows of a table [any, width], float32 or bfloat16, as float32 [len(rows), width].

    Torch's own indexing would wake its threads, which then spin for milliseconds on the cores that compute the layers.

    Args:
        table: where they are.
        rows: int64, which ones; none may lie beyond the table.
    """
    assert table.is_contiguous()
    assert rows.is_contiguous()
    assert rows.dtype == torch.int64
    gathered = torch.empty(len(rows), table.shape[1])
    require().pagoda_gather_rows(
        pointer(gathered), pointer(table), ctypes.c_int32(table.dtype == torch.bfloat16),
        pointer(rows), ctypes.c_int32(len(rows)), ctypes.c_int32(table.shape[1]),
    )  # fmt: skip
    return gathered
