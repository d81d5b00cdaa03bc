"""FP8 weights with scales for the tensor, for each output, or for blocks."""

from __future__ import annotations

import torch

from kernels.dequant.scales import e8m0_to_float, scale_blocks

__all__ = ["dequantise_fp8"]


def dequantise_fp8(
    codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], first_row: int = 0
) -> torch.Tensor:
    """Return rows of a matrix, float32 [num_rows, columns].

    Args:
        codes: float8_e4m3fn or float8_e5m2 [num_rows, columns]: the rows from ``first_row`` on.
        scales: of all blocks, [block rows, block columns]: floating-point numbers, or E8M0 exponents, also as uint8.
        block: rows and columns that have one scale.
    """
    is_exponent = scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
    return scale_blocks(codes.float(), e8m0_to_float(scales) if is_exponent else scales.float(), block, first_row)
