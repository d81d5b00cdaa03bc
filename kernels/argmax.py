"""The largest element of each row, for greedy sampling: by the C kernels on a CPU, else by torch."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu.library import library, pointer

__all__ = ["argmax_rows"]


def argmax_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest element of each row and its index, int64, the first of equal ones.

    Args:
        rows: float32 [num_rows, width], of which neither is 0.

    Returns:
        Both [num_rows]. A row with a NaN has NaN for its largest element, and any index.
    """
    kernels = library() if rows.device.type == "cpu" and rows.stride(1) == 1 and len(rows) else None
    if kernels is None:
        indices = rows.argmax(dim=1)
        return rows.gather(1, indices[:, None]).squeeze(1), indices
    assert rows.dtype == torch.float32
    values = torch.empty(len(rows))
    indices = torch.empty(len(rows), dtype=torch.int64)
    kernels.pagoda_argmax(
        pointer(values),
        pointer(indices),
        pointer(rows),
        ctypes.c_int64(len(rows)),
        ctypes.c_int64(rows.shape[1]),
        ctypes.c_int64(rows.stride(0)),
    )
    return values, indices
