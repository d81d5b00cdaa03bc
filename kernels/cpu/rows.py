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
        table: where they are, on the CPU.
        rows: int64, which ones.

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
    are_there = require().pagoda_gather_rows(
        pointer(gathered),
        pointer(table),
        ctypes.c_int32(table.dtype == torch.bfloat16),
        ctypes.c_int64(num_rows),
        pointer(rows),
        ctypes.c_int32(len(rows)),
        ctypes.c_int32(width),
    )
    if not are_there:
        raise IndexError(f"rows {int(rows.min())} to {int(rows.max())} are wanted of a table of {num_rows}")
    return gathered
