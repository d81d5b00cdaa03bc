"""The largest element of each row, for greedy sampling: in C on a CPU (csrc/sampling/argmax.h), else by torch."""

from __future__ import annotations

import torch

from kernels.cpu.library import library

__all__ = ["argmax_rows"]


def argmax_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest element of each row and its index, int64, the first of equal ones.

    Args:
        rows: float32 [num_rows, width]; both sizes are at least 1.

    Returns:
        Both [num_rows]. A row with a NaN has NaN for its largest element, and any index.
    """
    loaded = library() if rows.device.type == "cpu" and rows.stride(1) == 1 and len(rows) else None
    if loaded is None:
        indices = rows.argmax(dim=1)
        return rows.gather(1, indices[:, None]).squeeze(1), indices
    assert rows.dtype == torch.float32
    num_rows, width = rows.shape
    values, indices = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    loaded.pagoda_argmax(values.data_ptr(), indices.data_ptr(), rows.data_ptr(), num_rows, width, rows.stride(0))
    return values, indices
