"""Numbers of quantised weights, in C (csrc/dequant/decode_groups.h), where they are wanted: in float32 or bfloat16."""

from __future__ import annotations

import torch

from kernels.cpu.bindings import CGroupedCodes, address
from kernels.cpu.library import library

__all__ = ["decode_groups"]

_DTYPES = (torch.float32, torch.bfloat16)


def decode_groups(
    out: torch.Tensor,
    codes: torch.Tensor,
    table: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    *,
    zeros: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
    first: int = 0,
    is_high_first: bool = False,
) -> bool:
    """Write (table[code] - zero) * scale + bias to ``out`` in one pass, with the bits of torch's operators.

    Args:
        out: [num_rows, columns].
        codes: of one byte, [num_rows, num_bytes]; bytes of a row are neighbours.
        table: float32, the number of each code: [256], or [16] if a byte holds two codes.
        scales: [num_rows, num_groups], or one row or column of them for all.
        group_size: neighbouring columns with one scale; the last group may be smaller.
        zeros: the zero points, as the scales.
        biases: as the scales.
        first: columns of the first group that come before the row.
        is_high_first: the first of two codes is in the high half of a byte.

    Returns:
        False, and writes nothing, if the kernel does not do it: ``out`` is not contiguous, on another device or
        of another dtype, the sizes do not fit each other, or there is no library. Torch is the fallback.
    """
    if out.dtype not in _DTYPES or not out.is_contiguous() or codes.stride(1) != 1:
        return False
    if any(tensor.device.type != "cpu" for tensor in (out, codes, scales)) or (loaded := library()) is None:
        return False
    num_rows, columns = out.shape
    num_groups = max(part.shape[1] for part in (scales, zeros, biases) if part is not None)
    has_nibbles = len(table) == 16
    size = first + columns if num_groups == 1 else group_size
    if len(codes) != num_rows or codes.shape[1] * (1 + has_nibbles) < columns or num_groups * size < first + columns:
        return False

    def spread(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else part.float().expand(num_rows, num_groups).contiguous()

    table, scales_, zeros, biases = table.contiguous(), spread(scales), spread(zeros), spread(biases)
    loaded.pagoda_decode_groups(
        CGroupedCodes(
            *(out.data_ptr(), codes.data_ptr(), table.data_ptr(), address(scales_), address(zeros), address(biases)),
            *(num_rows, columns, num_groups, size, first, codes.stride(0)),
            *(out.dtype == torch.bfloat16, has_nibbles, is_high_first),
        )
    )
    return True
