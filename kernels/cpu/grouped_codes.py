"""Quantised weights in C (csrc/dequant/): codes to numbers where these are wanted, and transposed codes to rows."""

from __future__ import annotations

import torch

from kernels.cpu.bindings import CCodesByInputs, CGroupedCodes, address
from kernels.cpu.library import library

__all__ = [
    "can_write",
    "decode_by_inputs",
    "decode_gguf",
    "decode_groups",
    "decode_turned",
    "transpose",
    "turn_words",
    "unpack_fields",
]

_DTYPES = (torch.float32, torch.bfloat16)


def can_write(out: torch.Tensor) -> bool:
    """Return whether numbers can be decoded to ``out``, if there is a library."""
    return out.dtype in _DTYPES and out.is_contiguous() and out.device.type == "cpu"


def decode_groups(
    out: torch.Tensor,
    codes: torch.Tensor,
    table: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    *,
    scale_table: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
    first: int = 0,
    is_high_first: bool = False,
) -> bool:
    """Write (table[code] - zero) * scale + bias to ``out`` in one pass, with the bits of torch's operators.

    Args:
        out: [num_rows, columns].
        codes: of one byte, [num_rows, num_bytes]; bytes of a row are neighbours.
        table: float32, the number of each code: [256], which bfloat16 has exactly, or [16] if a byte holds two codes.
        scales: [num_rows, num_groups], or one row or column of them for all; numbers, or bytes if ``scale_table``.
        group_size: neighbouring columns with one scale; the last group may be smaller.
        scale_table: float32 [256], the scale of each byte.
        zeros: the zero points, as the scales.
        biases: as the scales.
        first: columns of the first group that come before the row, fewer than a group's.
        is_high_first: the first of two codes is in the high half of a byte.

    Returns:
        False, and writes nothing, if the kernel does not do it: ``out`` is not contiguous, on another device or
        of another dtype, the sizes do not fit each other, or there is no library. Torch is the fallback.
    """
    if not can_write(out) or codes.device.type != "cpu" or codes.stride(1) != 1 or (loaded := library()) is None:
        return False
    num_rows, columns = out.shape
    num_groups = max(part.shape[1] for part in (scales, zeros, biases) if part is not None)
    has_nibbles = len(table) == 16
    size = first + columns if num_groups == 1 else group_size
    if (
        first >= size
        or len(codes) != num_rows
        or codes.shape[1] * (1 + has_nibbles) < columns
        or num_groups * size < first + columns
    ):
        return False

    def spread(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else part.float().expand(num_rows, num_groups).contiguous()

    if scale_table is None:
        own_scales = spread(scales)
    else:
        own_scales = scales.view(torch.uint8).expand(num_rows, num_groups).contiguous()
        scale_table = scale_table.contiguous()
    table, zeros, biases = table.contiguous(), spread(zeros), spread(biases)
    loaded.pagoda_decode_groups(
        CGroupedCodes(
            *(out.data_ptr(), codes.data_ptr(), table.data_ptr(), address(own_scales), address(scale_table)),
            *(address(zeros), address(biases), num_rows, columns, num_groups, size, first, codes.stride(0)),
            *(out.dtype == torch.bfloat16, has_nibbles, is_high_first),
        )
    )
    return True


def decode_by_inputs(
    out: torch.Tensor,
    words: torch.Tensor,
    columns: slice,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group_size: int,
    *,
    is_awq: bool = False,
) -> bool:
    """Write (code - zero) * scale of 4-bit codes to ``out`` in one pass, with the bits of torch's operators.

    Args:
        out: [num_rows, num_inputs].
        words: int32, contiguous: GPTQ's [num_inputs / 8, all columns], or AWQ's [num_inputs, all columns].
        columns: the ``num_rows`` columns of GPTQ, or ``num_rows / 8`` of AWQ, that become rows.
        scales: float32 [num_rows, num_groups].
        zeros: the zero points, as the scales.
        group_size: neighbouring inputs with one scale.
        is_awq: the words hold 8 outputs in AWQ's order, else 8 inputs.

    Returns:
        False, and writes nothing, if the kernel does not do it: ``out`` is not in bfloat16, rows are not a multiple of
        16 (of AWQ's 128), or inputs or those of a group not one of 32; see ``decode_groups``.
    """
    (num_rows, num_inputs), own = out.shape, words[:, columns]
    fits = own.shape == ((num_inputs, num_rows // 8) if is_awq else (num_inputs // 8, num_rows))
    fits = fits and scales.shape == zeros.shape and len(scales) == num_rows
    is_here = words.device.type == "cpu" and words.is_contiguous() and _is_plain(scales) and _is_plain(zeros)
    if not fits or not is_here or out.dtype != torch.bfloat16 or not can_write(out) or (loaded := library()) is None:
        return False
    addresses = out.data_ptr(), own.data_ptr(), scales.data_ptr(), zeros.data_ptr()
    call = CCodesByInputs(*addresses, num_rows, num_inputs, scales.shape[1], group_size, words.shape[1], is_awq)
    return bool(loaded.pagoda_decode_by_inputs(call))


def _is_plain(part: torch.Tensor) -> bool:
    return part.dtype == torch.float32 and part.is_contiguous() and part.device.type == "cpu"


def decode_gguf(out: torch.Tensor, blocks: torch.Tensor, type_number: int) -> bool:
    """Write the numbers of GGUF blocks to ``out``, with the bits of torch's operators.

    Args:
        out: of any shape, with as many elements as the blocks.
        blocks: uint8 [num_blocks, block_bytes], contiguous.
        type_number: ggml's.

    Returns:
        False, and writes nothing, if the kernel does not do it; see ``decode_groups``.
    """
    if not can_write(out) or blocks.device.type != "cpu" or (loaded := library()) is None:
        return False
    written = loaded.pagoda_decode_gguf(
        out.data_ptr(), blocks.data_ptr(), len(blocks), type_number, out.dtype == torch.bfloat16
    )
    return bool(written)


def decode_turned(
    out: torch.Tensor, codes: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, scale_table: torch.Tensor
) -> bool:
    """Write table[code] * scale_table[scale] to ``out`` transposed, with the bits of torch's operators.

    Args:
        out: [columns, num_rows]; elements of a row are neighbours.
        codes: two a byte, the low one first, uint8 [num_rows, columns / 2], contiguous.
        table: float32 [16], the number of each code: 0, or from 0.5 to 6.
        scales: of 32 columns each, of one byte, [num_rows, columns / 32], contiguous.
        scale_table: float32 [256], the scale of each byte.

    Returns:
        False, and writes nothing, if the kernel does not do it: ``out`` is not in bfloat16, sizes are no multiples of
        32, or numbers may be subnormal or infinite; see ``decode_groups``.
    """
    (columns, num_rows), inputs = out.shape, (codes, scales)
    fits = codes.shape == (num_rows, columns // 2) and scales.shape == (num_rows, columns // 32)
    is_here = all(part.device.type == "cpu" and part.is_contiguous() for part in inputs) and out.device.type == "cpu"
    if not fits or not is_here or out.dtype != torch.bfloat16 or out.stride(1) != 1 or (loaded := library()) is None:
        return False
    table, scale_table = table.contiguous(), scale_table.contiguous()
    addresses = codes.data_ptr(), scales.data_ptr()
    written = loaded.pagoda_decode_turned(
        out.data_ptr(), out.stride(0), *addresses, num_rows, columns, table.data_ptr(), scale_table.data_ptr()
    )
    return bool(written)


def transpose(out: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Write a matrix to ``out`` transposed, [columns, num_rows], both of one dtype.

    Args:
        out: elements of a row are neighbours, rows need not be.
        matrix: contiguous.

    Returns:
        False, and writes nothing, if the kernel does not do it; see ``decode_groups``.
    """
    fits = out.dtype == matrix.dtype and out.shape == matrix.shape[::-1] and matrix.is_contiguous()
    is_here = out.device.type == matrix.device.type == "cpu" and out.dtype in _DTYPES
    if not fits or not is_here or out.stride(1) != 1 or (loaded := library()) is None:
        return False
    arguments, (num_rows, columns) = (out.data_ptr(), out.stride(0), matrix.data_ptr()), matrix.shape
    if out.dtype == torch.bfloat16:
        loaded.pagoda_turn_halves(*arguments, num_rows, columns)
    else:
        loaded.pagoda_turn_words(*arguments, num_rows, columns, columns)
    return True


def turn_words(words: torch.Tensor, columns: slice, *, is_awq: bool = False) -> torch.Tensor | None:
    """Return some columns of a matrix of words as rows, int32 [num_columns, num_rows].

    With ``is_awq`` the columns are nibbles, 8 of each word in AWQ's order, and the result's words hold 8 neighbouring
    ones of a row, the low ones first: [8 * num_columns, ceil(num_rows / 8)].

    Args:
        words: int32 [num_rows, all columns], contiguous.
        columns: some of them.
        is_awq: the words hold AWQ's nibbles.

    Returns:
        None if the kernel does not do it; see ``decode_groups``.
    """
    if words.device.type != "cpu" or not words.is_contiguous() or (loaded := library()) is None:
        return None
    num_rows, all_columns = words.shape
    own = words[:, columns]
    if is_awq:
        turned = torch.empty(8 * own.shape[1], -(-num_rows // 8), dtype=torch.int32)
        loaded.pagoda_turn_awq(turned.data_ptr(), own.data_ptr(), num_rows, own.shape[1], all_columns)
    else:
        turned = torch.empty(own.shape[1], num_rows, dtype=torch.int32)
        loaded.pagoda_turn_words(turned.data_ptr(), num_rows, own.data_ptr(), num_rows, own.shape[1], all_columns)
    return turned


def unpack_fields(octets: torch.Tensor, bits: int, width: int, *, is_high_first: bool = False) -> torch.Tensor | None:
    """Return the fields of bytes, one a byte, uint8 [num_rows, num_bytes * 8 / bits].

    Of each ``width`` neighbouring bytes the lowest bits of all come first, then the next ones.

    Args:
        octets: uint8 [num_rows, num_bytes]; bytes of a row are neighbours.
        bits: of a field: 1, 2 or 4.
        width: divides the bytes of a row.
        is_high_first: the highest bits come first.

    Returns:
        None if the kernel does not do it; see ``decode_groups``.
    """
    if octets.device.type != "cpu" or octets.stride(1) != 1 or (loaded := library()) is None:
        return None
    num_rows, num_octets = octets.shape
    assert num_octets % width == 0
    unpacked = torch.empty(num_rows, num_octets * 8 // bits, dtype=torch.uint8)
    addresses = unpacked.data_ptr(), octets.data_ptr()
    loaded.pagoda_unpack_fields(*addresses, num_rows, num_octets, octets.stride(0), width, bits, is_high_first)
    return unpacked
