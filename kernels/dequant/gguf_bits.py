"""The bit fields that GGUF's block formats consist of."""

from __future__ import annotations

import torch

__all__ = ["fields", "half_floats"]


def fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the fields of bytes, uint8 [..., 8 // bits, width] of uint8 [..., width].

    The lowest bits of all bytes come first, then the next ones: a byte's fields are far apart.
    """
    packed = packed.contiguous()  # one operation a field is several times as fast as one on a tensor of shifts
    return torch.stack([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], dim=-2)


def half_floats(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the float16 at byte ``start`` of each block, [num_blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)
