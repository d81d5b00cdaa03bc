"""FP8 weights with scales for the tensor, for each output, or for blocks."""

from __future__ import annotations

from functools import cache

import torch

from kernels.cpu.grouped_codes import decode_groups
from kernels.dequant.scales import e8m0_numbers, e8m0_to_float, row_scales, scale_blocks

__all__ = ["dequantise_fp8", "e4m3_numbers"]


_NAN, _SIGN_AND_LOW = 0x7F, -0x4001  # a code but for its sign; all bits but the highest of float16's exponent


def e4m3_to_float(codes: torch.Tensor) -> torch.Tensor:
    """Return float8_e4m3fn as float32, in a tenth of the time of torch's conversion on a CPU.

    The bits of a code, at their place in a float16, are 2**-8 of its value, also those of the smallest numbers.
    """
    octets = codes.view(torch.uint8)
    shifted = octets.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(_SIGN_AND_LOW)
    values = shifted.view(torch.float16).float().mul_(2.0**8)
    magnitudes = octets & _NAN
    if magnitudes.numel() and int(magnitudes.max()) == _NAN:
        values.masked_fill_(magnitudes == _NAN, torch.nan)
    return values


def dequantise_fp8(
    codes: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    first_row: int = 0,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return rows of a matrix, float32 [num_rows, columns]; or ``out``, if they could be written there.

    Args:
        codes: float8_e4m3fn or float8_e5m2 [num_rows, columns]: the rows from ``first_row`` on.
        scales: of all blocks, [block rows, block columns]: floating-point numbers, or E8M0 exponents, also as uint8.
        block: rows and columns that have one scale.
        out: [num_rows, columns], of any dtype.
    """
    is_exponent = scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
    scales = scales.view(torch.uint8) if is_exponent else scales.float()
    if out is not None and decode_groups(
        out,
        codes,
        _numbers(codes.dtype),
        row_scales(scales, block[0], first_row, len(codes)),
        block[1],
        scale_table=e8m0_numbers() if is_exponent else None,
    ):
        return out
    return scale_blocks(_to_float(codes), e8m0_to_float(scales) if is_exponent else scales, block, first_row)


def e4m3_numbers() -> torch.Tensor:
    """Return the number of each byte, float32 [256]."""
    return _numbers(torch.float8_e4m3fn)


def _to_float(codes: torch.Tensor) -> torch.Tensor:
    return e4m3_to_float(codes) if codes.dtype == torch.float8_e4m3fn else codes.float()


@cache
def _numbers(dtype: torch.dtype) -> torch.Tensor:
    return _to_float(torch.arange(256, dtype=torch.uint8).view(dtype))
