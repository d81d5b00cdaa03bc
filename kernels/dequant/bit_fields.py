"""The bit fields and halves that stored bytes consist of."""

from __future__ import annotations

import torch

from kernels.cpu.grouped_codes import unpack_fields

__all__ = ["fields", "half_floats"]


def fields(packed: torch.Tensor, bits: int, width: int, *, is_high_first: bool = False) -> torch.Tensor:
    """Return the fields of bytes, uint8 [num_rows, num_bytes * 8 / bits] of uint8 [num_rows, num_bytes].

    Of each ``width`` neighbouring bytes the lowest bits of all come first, then the next ones: with more than one, a
    byte's fields are far apart.

    Args:
        packed: bytes of a row are neighbours.
        bits: of a field: 1, 2 or 4.
        width: divides the bytes of a row.
        is_high_first: the highest bits come first.
    """
    unpacked = unpack_fields(packed, bits, width, is_high_first=is_high_first)
    if unpacked is None:
        shifts = range(0, 8, bits)
        groups = packed.reshape(
            len(packed), -1, width
        )  # one operation a field is faster than one on a tensor of shifts
        parts = [(groups >> shift) & (2**bits - 1) for shift in (reversed(shifts) if is_high_first else shifts)]
        unpacked = torch.stack(parts, dim=2).view(len(packed), -1)
    return unpacked


def half_floats(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the float16 at byte ``start`` of each block, [num_blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)
