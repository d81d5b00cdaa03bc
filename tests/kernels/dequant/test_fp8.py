"""FP8 codes and E8M0 exponents: all 256 of each, and scales of blocks of every size."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from kernels.dequant.fp8 import dequantise_fp8
from kernels.dequant.scales import e8m0_to_float, scale_blocks

BYTES = torch.arange(256, dtype=torch.uint8)


def e4m3(code: int) -> float:
    """Return what a byte means: no infinities, and NaN where all bits but the sign are set."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def e5m2(code: int) -> float:
    """Return what a byte means: the upper half of a float16."""
    return float(struct.unpack("<e", bytes([0, code]))[0])


def bits(values: torch.Tensor) -> list[int | str]:
    """Return the bits of float32 numbers, with one name for all NaNs."""
    return [
        "NaN" if math.isnan(value) else bit
        for value, bit in zip(values.flatten().tolist(), values.flatten().view(torch.int32).tolist(), strict=True)
    ]


@pytest.mark.parametrize(("dtype", "value"), [(torch.float8_e4m3fn, e4m3), (torch.float8_e5m2, e5m2)])
@pytest.mark.parametrize("scale", [1.0, 0.0123, -3.0e-38, 2.0**100])
def test_all_codes(dtype: torch.dtype, value: object, scale: float) -> None:
    codes = BYTES.view(dtype).view(16, 16)
    expected = torch.tensor([value(code) for code in range(256)]) * torch.tensor(scale)  # type: ignore[operator]
    assert bits(dequantise_fp8(codes, torch.tensor([[scale]]), (16, 16))) == bits(expected)


def test_all_exponents() -> None:
    expected = torch.tensor([2.0 ** (code - 127) for code in range(255)] + [math.nan])
    assert bits(e8m0_to_float(BYTES)) == bits(expected)
    assert bits(e8m0_to_float(BYTES.view(torch.float8_e8m0fnu))) == bits(expected)
    codes = torch.full((256, 4), 1.0).to(torch.float8_e4m3fn)
    for stored in (BYTES, BYTES.view(torch.float8_e8m0fnu)):
        assert bits(dequantise_fp8(codes, stored.view(-1, 1), (1, 4))[:, 3].contiguous()) == bits(expected)


@pytest.mark.parametrize("first", [0, 1, 5, 9])
@pytest.mark.parametrize("block", [(1, 1), (1, 12), (1, 5), (3, 4), (4, 5), (16, 2), (16, 12)])
def test_each_element_has_the_scale_of_its_block(block: tuple[int, int], first: int) -> None:
    rows, columns = 16, 12
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    scales = torch.arange(1.0, 1 + math.prod(grid)).view(grid)
    expected = [
        [float(scales[row // block[0], column // block[1]]) for column in range(columns)] for row in range(first, rows)
    ]
    assert scale_blocks(torch.ones(rows - first, columns), scales, block, first).tolist() == expected
