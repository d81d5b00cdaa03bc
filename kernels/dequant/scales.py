"""Scales of blocks of a matrix: their exponents as numbers, and the product with the matrix."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["e8m0_numbers", "e8m0_to_float", "row_scales", "scale_blocks"]

_SMALLEST, _NAN = 0x00400000, 0x7FC00000  # the bits of 2**-127 and of a NaN in float32


def e8m0_to_float(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2**(e - 127) for each byte e in float32, and NaN for 255: the format E8M0 of the OCP's microscaling."""
    exponents = exponents.view(torch.uint8)
    bits = exponents.to(torch.int32) << 23
    bits.masked_fill_(exponents == 0, _SMALLEST).masked_fill_(exponents == 255, _NAN)
    return bits.view(torch.float32)


@cache
def e8m0_numbers() -> torch.Tensor:
    """Return the number of each byte, float32 [256]."""
    return e8m0_to_float(torch.arange(256, dtype=torch.uint8))


def row_scales(scales: torch.Tensor, block_rows: int, first_row: int, num_rows: int) -> torch.Tensor:
    """Return the scales of some rows, [num_rows, as many], or the only row of scales for all.

    Args:
        scales: [ceil(all rows / block rows), any], or one row.
        block_rows: rows that have one scale.
        first_row: the first of the rows.
        num_rows: how many.
    """
    if len(scales) == 1:
        return scales
    first, last = first_row // block_rows, (first_row + num_rows - 1) // block_rows
    scales = scales[first : last + 1]
    if block_rows == 1:
        return scales
    return scales[torch.arange(first_row, first_row + num_rows, device=scales.device) // block_rows - first]


def scale_blocks(x: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], first_row: int) -> torch.Tensor:
    """Multiply rows of a matrix in place by the scales of its blocks, and return them. The last blocks may be partial.

    Args:
        x: float32 [num_rows, columns], contiguous: the rows from ``first_row`` on.
        scales: float32 [ceil(all rows / block rows), ceil(columns / block columns)], or fewer of a kind: broadcast.
        block: rows and columns that have one scale.
    """
    num_rows, columns = x.shape
    block_rows, block_columns = block
    scales = row_scales(scales, block_rows, first_row, num_rows)
    if scales.shape[1] == 1:
        return x.mul_(scales)
    if columns == scales.shape[1] * block_columns:
        x.view(num_rows, -1, block_columns).mul_(scales[:, :, None])
        return x
    return x.mul_(scales.repeat_interleave(block_columns, dim=1)[:, :columns])
