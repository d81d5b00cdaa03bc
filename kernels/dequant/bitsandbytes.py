"""Weights of bitsandbytes: 4-bit codes with a scale for each block, and integers with one for each output."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from kernels.cpu.grouped_codes import decode_groups
from kernels.dequant.fp4 import unpack_pairs

__all__ = ["ByteLevels", "byte_levels", "dequantise_4bit", "dequantise_int8", "dequantise_nested"]

_OVER_127 = 7.874015718698502e-3
_SMALLEST_TOP, _TOP, _TOPS = 64, 127, 6301  # the levels that the largest number may have, and how many are tried


@dataclass(frozen=True)
class ByteLevels:
    """A table of 16 numbers as ``scale * (level - ZERO)``, with levels of a byte.

    Attributes:
        scale: of the levels.
        levels: from 1 to 255. A number of zero has the level ``ZERO``, so zeros stay zeros.
    """

    ZERO = 128
    scale: float
    levels: tuple[int, ...]


@lru_cache(maxsize=64)
def byte_levels(table: tuple[float, ...]) -> ByteLevels | None:
    """Return the levels of a table with the least squared error; None if a number is not finite, or all are 0.

    The kernels multiply bytes, and numbers such as NF4's are not multiples of one scale. With the best one they are
    wrong by 0.0038 of the largest number at most, and by 0.0017 as a root mean square. NF4 itself rounds weights by
    about twenty times as much.
    """
    numbers = torch.tensor(table, dtype=torch.float64)
    largest = float(numbers.abs().max())
    if not 0 < largest < torch.inf:  # also of NaN
        return None
    tops = torch.linspace(_SMALLEST_TOP, _TOP, _TOPS, dtype=torch.float64)[:, None]
    levels = (numbers / largest * tops).round()
    errors = (levels / tops - numbers / largest).square().sum(1)
    best = int(errors.argmin())
    return ByteLevels(largest / float(tops[best]), tuple(int(level) + ByteLevels.ZERO for level in levels[best]))


def dequantise_4bit(
    octets: torch.Tensor,
    table: torch.Tensor,
    scales: torch.Tensor,
    block_size: int,
    first: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return elements of a weight in the order of memory, float32 [2 * num_bytes]; or ``out``, if that was filled.

    Args:
        octets: uint8 [num_bytes], the elements from ``first`` on; the first of two is in the high half of a byte.
        table: float32 [16], the number of each code.
        scales: float32, of all blocks.
        block_size: neighbouring elements with one scale.
        first: index of the first element.
        out: the elements may be written here, of any dtype; without the last one, if their number is odd.
    """
    if out is not None and decode_groups(
        out[None],
        octets[None],
        table,
        scales[None, first // block_size :],
        block_size,
        first=first % block_size,
        is_high_first=True,
    ):
        return out
    codes = torch.arange(256, device=octets.device)
    pairs = torch.stack((table[codes >> 4], table[codes & 15]), dim=1)
    values = unpack_pairs(octets.view(1, -1), pairs).view(-1)
    first_block, last = first // block_size, first + len(values)
    own = scales[first_block : -(-last // block_size)]
    if first % block_size == 0 and len(values) == len(own) * block_size:
        values.view(-1, block_size).mul_(own[:, None])
        return values
    start = first - first_block * block_size
    return values.mul_(own.repeat_interleave(block_size)[start : start + len(values)])


def dequantise_nested(
    codes: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, block_size: int, offset: float, *, first: int
) -> torch.Tensor:
    """Return scales that are quantised themselves, float32 [num_scales].

    Args:
        codes: uint8 [num_scales], of a weight's scales from ``first`` on.
        table: float32 [256], the number of each code.
        scales: float32, of all blocks of a weight's scales.
        block_size: neighbouring codes with one of these scales.
        offset: that all are larger by.
        first: index of the first code.
    """
    last = first + len(codes)
    own = scales[first // block_size : -(-last // block_size)].repeat_interleave(block_size)
    return (table[codes.int()] * own[first % block_size :][: len(codes)]).add_(offset)


def dequantise_int8(codes: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """Return rows of a matrix, float32 [num_rows, columns].

    Args:
        codes: int8 [num_rows, columns].
        maxima: float32 [num_rows]: the number that 127 stands for.
    """
    return codes.float().mul_(maxima[:, None]).mul_(_OVER_127)
