"""Matrices that are stored with inputs as rows."""

from __future__ import annotations

import torch

from kernels.cpu.grouped_codes import transpose

__all__ = ["TURNED_ELEMENTS", "write_transposed"]

TURNED_ELEMENTS = 2**19  # to dequantise before they are turned: they stay in a processor's cache


def write_transposed(out: torch.Tensor, values: torch.Tensor) -> None:
    """Write a matrix transposed, converted to the dtype of ``out``.

    Args:
        out: [columns, num_rows]; rows need not be neighbours.
        values: [num_rows, columns].
    """
    if not transpose(out, values):
        out.copy_(values.t())
