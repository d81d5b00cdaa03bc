"""Reading quantised weights as they are stored, codes and scales, for the linear methods that compute with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch

from engine.errors import ModelLoadError
from engine.models.checkpoint.composed_weight import ComposedWeight, Entry
from engine.models.checkpoint.files.tensor_files import TensorFiles
from engine.models.checkpoint.own_memory import own_memory
from engine.models.checkpoint.packed_weight import MatrixParts, PackedWeight, Scratch, row_blocks
from engine.models.checkpoint.sharding import Shard
from kernels.coded_weight import BLOCK_INPUTS, SMALLEST_NOT_FINITE, CodedMatrix, CodedWeight, CodeFormat
from kernels.cpu.stored_codes import largest_magnitude, largest_octet
from kernels.dequant.scale_tables import scale_table
from kernels.dequant.stored import unpacked

__all__ = ["code_format_of", "joined", "read_coded", "why_not_coded"]

_NO_MATRIX = "they are not matrices that are computed from their codes"
_LARGE = 3e38 / 2**16  # a scale below it gives numbers that are finite in bfloat16, whatever the codes are


def code_format_of(entry: Entry, shard: Shard | None) -> CodeFormat | None:
    """Return how the codes of a weight, or of a ``shard`` of it, are kept as they are; None if they cannot be."""
    form = _format_or_reason(entry, shard)
    return form if isinstance(form, CodeFormat) else None


def why_not_coded(entry: Entry, shard: Shard | None) -> str:
    """Return why a weight, or a ``shard`` of it, has no ``code_format_of``."""
    reason = _format_or_reason(entry, shard)
    assert isinstance(reason, str)
    return reason


def _format_or_reason(entry: Entry, shard: Shard | None) -> CodeFormat | str:
    if isinstance(entry, ComposedWeight) and entry.layout == "stacked" and shard is not None:
        return _format_or_reason(entry.members[shard.index], replace(shard, num_stacked=None, index=0))
    is_member = shard is not None and shard.num_stacked is not None
    if not isinstance(entry, PackedWeight) or entry.is_convolution or len(entry.shape) - 2 != is_member:
        return _NO_MATRIX
    if shard is not None and shard.start == shard.stop:
        return _NO_MATRIX
    form = entry.code_format
    if form is None:
        return entry.why_not_coded
    if shard is None or shard.dim == 0 or shard.is_whole:
        return form
    if form.has_input_order:
        return "ranks divide their inputs, which are in the order of their groups"
    group = form.group if form.group < shard.full else BLOCK_INPUTS  # of all inputs, or fewer
    is_aligned = shard.start % group == 0 and (shard.stop % group == 0 or shard.stop == shard.full)
    return form if is_aligned else "ranks divide their groups of inputs"


def read_coded(files: TensorFiles, entry: Entry, shard: Shard | None, scratch: Scratch) -> CodedMatrix:
    """Return a weight that has a ``code_format_of``, or a ``shard`` of it.

    Raises:
        ModelLoadError: if a scale or a code is not finite.
        OSError: if a file cannot be read.
    """
    if isinstance(entry, ComposedWeight):
        assert shard is not None
        return read_coded(files, entry.members[shard.index], replace(shard, num_stacked=None, index=0), scratch)
    assert isinstance(entry, PackedWeight)
    index = shard.index if shard is not None and shard.num_stacked is not None else 0
    first = index * entry.shape[-2] if entry.is_tall else 0
    rows, columns = range(first, first + entry.shape[-2]), None
    if shard is not None and shard.dim == 0:
        rows = range(first + shard.start, first + shard.stop)
    elif shard is not None and not shard.is_whole:
        columns = (shard.start, shard.stop)
    parts = MatrixParts(files, entry, 0 if entry.is_tall else index, scratch)
    if columns is None and entry.keeps_stored_codes:
        return _read_stored(parts, rows)
    return _read_blocks(parts, rows, columns)


def _read_stored(parts: MatrixParts, rows: range) -> CodedMatrix:
    """Return rows whose codes are kept as they are stored: in one piece, into memory of their own."""
    entry, multiple = parts.packed, parts.packed.row_multiple
    all_rows, _ = entry.matrix_shape
    start = rows.start // multiple * multiple
    read = range(start, min(-(-rows.stop // multiple) * multiple, all_rows))
    kept, are_codes_finite = parts.kept_rows(read)
    matrix = entry.coded(parts.whole() | kept, read)
    matrix = matrix.rows(slice(rows.start - start, rows.stop - start))
    if not (are_codes_finite and _are_scales_finite(matrix)):
        _require_finite(entry, unpacked(matrix))
    return matrix.with_parts({name: parts.scratch.kept(part) for name, part in matrix.parts.items()})


def _read_blocks(parts: MatrixParts, rows: range, columns: tuple[int, int] | None) -> CodedMatrix:
    """Return rows, or some columns of them, whose codes are unpacked block by block."""
    entry, whole, target = parts.packed, parts.whole(), None
    for read, wanted in row_blocks(entry, rows):
        block = unpacked(entry.coded(whole | parts.by_rows(read), read))
        block = block.rows(slice(wanted.start - read.start, wanted.stop - read.start))
        if columns is not None:
            block = block.columns(*columns)
        _require_finite(entry, block)
        target = _empty_like(block, len(rows)) if target is None else target
        for name, part in block.parts.items():
            target.parts[name][wanted.start - rows.start : wanted.stop - rows.start] = part
    assert target is not None
    return target


def joined(matrices: Sequence[CodedMatrix]) -> CodedWeight:
    """Return matrices, one below the other, as one weight."""
    sections: list[CodedMatrix] = []
    for _, group in groupby(matrices, key=lambda matrix: matrix.format):
        same = list(group)
        if len({(matrix.layout, matrix.codes.shape[1]) for matrix in same}) > 1:
            same = [unpacked(matrix) for matrix in same]
        if len(same) > 1:
            whole = _empty_like(same[0], sum(matrix.shape[0] for matrix in same))
            for name, part in whole.parts.items():
                torch.cat([matrix.parts[name] for matrix in same], out=part)
            same = [whole]
        sections += same
    return CodedWeight(tuple(sections))


def _empty_like(block: CodedMatrix, num_rows: int) -> CodedMatrix:
    return block.with_parts(
        {name: own_memory((num_rows, *part.shape[1:]), part.dtype) for name, part in block.parts.items()}
    )


def _are_scales_finite(matrix: CodedMatrix) -> bool:
    """Return whether scales and minima are finite, and small enough for all products with codes to be."""
    factors, layout = [matrix.outer_scales, matrix.outer_minima, matrix.output_scales], matrix.layout
    if layout is not None and layout.scales is not None:
        table = scale_table(layout.scales, matrix.format.outer_dtype)
        mask = 0x7F if layout.scales == "e4m3 halves" else 0xFF  # without a sign the largest byte is the largest scale
        factors[0] = table[largest_octet(matrix.outer_scales.contiguous(), mask), None]
    return all(part is None or _is_bounded(part) for part in factors)


def _is_bounded(factors: torch.Tensor) -> bool:
    return largest_magnitude(factors) < _LARGE  # not if one is NaN


def _require_finite(weight: PackedWeight, block: CodedMatrix) -> None:
    floats = block.format.floats
    if floats is not None and largest_octet(block.codes.contiguous(), 0x7F) >= SMALLEST_NOT_FINITE[floats]:
        raise ModelLoadError(
            f"'{weight.name}' of '{weight.path}' ({weight.format}) has numbers that are not finite; "
            "download the file again"
        )
    for factors in (block.outer_scales, block.outer_minima, block.output_scales):
        if factors is not None and not _is_bounded(factors):
            largest = largest_magnitude(factors)
            raise ModelLoadError(
                f"'{weight.name}' of '{weight.path}' ({weight.format}) has a scale of {largest:.3g}, which is not "
                "finite, or is too large for codes; download the file again, or set quantization to 'dequantize'"
            )
