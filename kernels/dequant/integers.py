"""Integer weights with scales and zero points for groups of inputs, and integers packed in words."""

from __future__ import annotations

import math
from functools import cache

import torch

from kernels.cpu.grouped_codes import decode_by_inputs, decode_groups, turn_words
from kernels.dequant.bit_fields import fields
from kernels.dequant.fp4 import unpack_pairs
from kernels.dequant.scales import scale_blocks

__all__ = [
    "awq_nibbles",
    "dequantise_affine",
    "dequantise_affine_packed",
    "dequantise_awq",
    "dequantise_gptq",
    "dequantise_groups",
    "dequantise_ordered",
    "dequantise_packed",
    "turn_words_to_rows",
    "unpack_awq",
    "unpack_bits",
    "unpack_floats",
]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds, the lowest first


def unpack_bits(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the integers of ``bits`` bits that rows of words hold one after another, the low bits first.

    Args:
        words: [num_rows, num_words], contiguous, of any integer type; an integer may begin in one word and end in the
            next.
        bits: from 1 to 8.
        count: integers of a row.

    Returns:
        uint8 [num_rows, count].
    """
    num_rows = len(words)
    octets = words.view(torch.uint8).view(num_rows, -1)
    if bits == 8:
        return octets[:, :count]
    size = math.lcm(bits, 8) // 8  # bytes after which an integer ends with a byte
    if octets.shape[1] % size:
        octets = torch.nn.functional.pad(octets, (0, size - octets.shape[1] % size))
    if size == 1:
        return fields(octets, bits, 1)[:, :count]
    wide = octets.view(num_rows, -1, size).to(torch.int64)
    joined = sum(wide[..., index] << 8 * index for index in range(size))
    assert isinstance(joined, torch.Tensor)
    parts = [(joined >> shift & (1 << bits) - 1).to(torch.uint8) for shift in range(0, 8 * size, bits)]
    return torch.stack(parts, dim=2).view(num_rows, -1)[:, :count]


def unpack_floats(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return what ``unpack_bits`` does in float32, contiguous."""
    if bits == 4 and count % 2 == 0:
        return unpack_pairs(words.view(torch.uint8).view(len(words), -1), _nibbles().to(words.device))[
            :, :count
        ].contiguous()
    return unpack_bits(words, bits, count).to(torch.float32, memory_format=torch.contiguous_format)


@cache
def _nibbles() -> torch.Tensor:
    return torch.tensor([(float(octet & 15), float(octet >> 4)) for octet in range(256)])


@cache
def _table(dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.uint8).view(dtype).float()


def dequantise_packed(
    words: torch.Tensor,
    bits: int,
    columns: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | int,
    group_size: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what ``dequantise_groups`` does for codes that are packed in words, as ``unpack_bits`` has them."""
    if out is not None and bits in (4, 8) and _write(out, _octets(words), 1 << bits, scales, zeros, group_size):
        return out
    return dequantise_groups(unpack_floats(words, bits, columns), scales, zeros, group_size)


def _octets(words: torch.Tensor) -> torch.Tensor:
    return words.view(torch.uint8).view(len(words), -1)


def _write(
    out: torch.Tensor,
    codes: torch.Tensor,
    num_codes: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | int,
    group_size: int,
) -> bool:
    """Write the numbers of codes of 8 bits, or of 4 bits in pairs, to ``out``; return whether that was possible."""
    if isinstance(zeros, int):
        zeros = torch.full((1, 1), float(zeros), device=codes.device)
    return decode_groups(out, codes, _table(codes.dtype, num_codes), scales, group_size, zeros=zeros)


def dequantise_groups(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | int,
    group_size: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return (code - zero point) * scale, float32 [num_rows, columns]; or ``out``, if they could be written there.

    Args:
        codes: integers, of any type, [num_rows, columns]; floats are overwritten.
        scales: [num_rows, ceil(columns / group_size)], or one row or column of them for all.
        zeros: the zero points, [num_rows, ceil(columns / group_size)], or one for all.
        group_size: neighbouring columns with one scale; the last group may be smaller.
        out: of the codes' shape, of any dtype.
    """
    if out is not None and codes.element_size() == 1 and _write(out, codes, 256, scales, zeros, group_size):
        return out
    values = codes.to(torch.float32, memory_format=torch.contiguous_format)  # itself, if they are floats already
    if isinstance(zeros, int):
        if zeros:
            values.sub_(zeros)
    else:
        values = _subtract(values, zeros.float(), group_size)
    return scale_blocks(values, scales.float(), (1, group_size), 0)


def _subtract(values: torch.Tensor, zeros: torch.Tensor, group_size: int) -> torch.Tensor:
    num_rows, columns = values.shape
    if zeros.shape[1] == 1:
        return values.sub_(zeros)
    if columns == zeros.shape[1] * group_size:
        values.view(num_rows, -1, group_size).sub_(zeros[:, :, None])
        return values
    return values.sub_(zeros.repeat_interleave(group_size, dim=1)[:, :columns])


def dequantise_ordered(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | int, group_of: torch.Tensor
) -> torch.Tensor:
    """Return (code - zero point) * scale, float32 [num_rows, columns], with groups of columns in any order.

    Args:
        codes: integers, of any type, [num_rows, columns]; floats are overwritten.
        scales: [num_rows, num_groups].
        zeros: the zero points, [num_rows, num_groups], or one for all.
        group_of: the group of each column, int64 [columns].
    """
    zero = zeros if isinstance(zeros, int) else zeros.float()[:, group_of]
    return (codes.float() - zero).mul_(scales.float()[:, group_of])


def dequantise_gptq(
    words: torch.Tensor,
    columns: slice,
    bits: int,
    num_inputs: int,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group_size: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what ``dequantise_groups`` does for GPTQ's codes, float32 [num_columns, num_inputs], or ``out``.

    Args:
        words: int32 [ceil(num_inputs * bits / 32), all columns], contiguous; each column as ``unpack_bits`` has a row.
        columns: some of them.
        bits: from 1 to 8.
        num_inputs: codes of a column.
        scales: of the result's rows, [num_columns, ceil(num_inputs / group_size)].
        zeros: the zero points, as the scales.
        group_size: neighbouring columns of the result with one scale.
        out: of the result's shape, of any dtype.
    """
    if out is not None and bits == 4 and decode_by_inputs(out, words, columns, scales, zeros, group_size):
        return out
    turned = turn_words_to_rows(words, columns)
    return dequantise_packed(turned, bits, num_inputs, scales, zeros, group_size, out=out)


def turn_words_to_rows(words: torch.Tensor, columns: slice) -> torch.Tensor:
    """Return some columns of a matrix as rows, contiguous int32 [num_columns, num_rows]; ``words`` is contiguous."""
    turned = turn_words(words, columns)
    return words[:, columns].t().contiguous() if turned is None else turned


def dequantise_awq(
    words: torch.Tensor,
    columns: slice,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group_size: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what ``dequantise_groups`` does for AWQ's codes, float32 [8 * num_columns, num_rows], or ``out``.

    Args:
        words: int32 [num_rows, all columns], contiguous.
        columns: some of them.
        scales: of the result's rows, [8 * num_columns, ceil(num_rows / group_size)].
        zeros: the zero points, as the scales.
        group_size: neighbouring columns of the result with one scale.
        out: of the result's shape, of any dtype.
    """
    if out is not None and decode_by_inputs(out, words, columns, scales, zeros, group_size, is_awq=True):
        return out
    turned = turn_words(words, columns, is_awq=True)
    if turned is None:
        return dequantise_groups(unpack_awq(words[:, columns]), scales, zeros, group_size)
    return dequantise_packed(turned, 4, len(words), scales, zeros, group_size, out=out)


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit integers of AWQ's words. Each word holds neighbouring columns in an order of its own.

    Args:
        words: int32 [num_rows, columns / 8].

    Returns:
        float32 [columns, num_rows]: transposed.
    """
    transposed = words.t().contiguous()
    columns = torch.empty(len(transposed), 8, len(words), device=words.device)
    for nibble, column in enumerate(_AWQ_ORDER):
        columns[:, column].copy_((transposed >> 4 * nibble).bitwise_and_(15))
    return columns.view(-1, len(words))


def awq_nibbles(words: torch.Tensor, columns: slice) -> torch.Tensor:
    """Return what ``unpack_awq`` does of some columns of words, two a byte with the first one in the low half.

    Args:
        words: int32 [num_rows, all columns], contiguous.
        columns: some of them.

    Returns:
        uint8 [8 * num_columns, at least num_rows / 2].
    """
    turned = turn_words(words, columns, is_awq=True)
    if turned is not None:
        return turned.view(torch.uint8)
    codes = torch.nn.functional.pad(unpack_awq(words[:, columns]).byte(), (0, len(words) % 2))
    return codes[:, ::2] | codes[:, 1::2] << 4


def dequantise_affine_packed(
    words: torch.Tensor,
    bits: int,
    columns: int,
    scales: torch.Tensor,
    biases: torch.Tensor,
    group_size: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what ``dequantise_affine`` does for codes that are packed in words, as ``unpack_bits`` has them."""
    if out is not None and bits in (4, 8):
        codes = _octets(words)
        if decode_groups(out, codes, _table(codes.dtype, 1 << bits), scales, group_size, biases=biases):
            return out
    return dequantise_affine(unpack_floats(words, bits, columns), scales, biases, group_size)


def dequantise_affine(codes: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return code * scale + bias, float32 [num_rows, columns].

    Args:
        codes: integers, of any type, [num_rows, columns]; floats are overwritten.
        scales: [num_rows, columns / group_size].
        biases: as the scales.
        group_size: neighbouring columns with one scale.
    """
    values = scale_blocks(codes.float().contiguous(), scales.float(), (1, group_size), 0)
    return _subtract(values, -biases.float(), group_size)
