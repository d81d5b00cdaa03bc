"""FP4 weights, two codes a byte with the even element in the low half, and scales for groups of inputs."""

from __future__ import annotations

from functools import cache

import torch

from kernels.cpu.grouped_codes import decode_groups, decode_turned
from kernels.dequant.scales import scale_blocks

__all__ = ["E2M1", "FP4_LEVELS", "dequantise_fp4", "unpack_pairs", "write_fp4_transposed"]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP4_LEVELS = tuple(int(2 * number) + 12 for number in E2M1)  # as integers from 0 on


def dequantise_fp4(
    octets: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    *,
    scale_table: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return rows of a matrix, float32 [num_rows, 2 * num_bytes]; or ``out``, if they could be written there.

    Args:
        octets: uint8 [num_rows, num_bytes].
        scales: float32 [num_rows, columns / group_size], or bytes if ``scale_table``.
        group_size: neighbouring columns with one scale.
        scale_table: float32 [256], the scale of each byte.
        out: of the same shape, of any dtype.
    """
    pairs = _e2m1_pairs()
    if out is not None and decode_groups(out, octets, pairs[:16, 0], scales, group_size, scale_table=scale_table):
        return out
    if scale_table is not None:
        scales = scale_table[scales.view(torch.uint8).int()]
    return scale_blocks(unpack_pairs(octets, pairs.to(octets.device)), scales, (1, group_size), 0)


def write_fp4_transposed(
    out: torch.Tensor, octets: torch.Tensor, scales: torch.Tensor, scale_table: torch.Tensor
) -> bool:
    """Write a matrix with scales of 32 columns to ``out`` [columns, num_rows] if C can do that; else return False.

    Args:
        out: of any dtype.
        octets: uint8 [num_rows, num_bytes].
        scales: of a byte, [num_rows, columns / 32].
        scale_table: float32 [256], the scale of each byte.
    """
    return decode_turned(out, octets, _e2m1_pairs()[:16, 0], scales.view(torch.uint8), scale_table)


def unpack_pairs(octets: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return the two numbers that each byte stands for, float32 [num_rows, 2 * num_bytes].

    Args:
        octets: uint8 [num_rows, num_bytes].
        pairs: float32 [256, 2].
    """
    joined = pairs.view(torch.float64).view(256)  # only copied, as eight bytes
    return joined.index_select(0, octets.reshape(-1).int()).view(torch.float32).view(len(octets), -1)


@cache
def _e2m1_pairs() -> torch.Tensor:
    return torch.tensor([(E2M1[code & 15], E2M1[code >> 4]) for code in range(256)])
