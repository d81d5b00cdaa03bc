"""Matrices that are stored with inputs as rows."""

from __future__ import annotations

import torch

from kernels.cpu.grouped_codes import transpose

__all__ = ["transposed"]


def transposed(values: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a matrix transposed, contiguous [columns, num_rows]; or ``out``, if it could be written there.

    Args:
        values: [num_rows, columns].
        out: [columns, num_rows], of any dtype.
    """
    if out is not None and transpose(out, values):
        return out
    return values.t().contiguous()
