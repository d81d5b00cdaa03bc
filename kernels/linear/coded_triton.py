"""A linear layer in Triton on weights that stay codes: a program decodes its weights in registers and multiplies.

coded_tiles.py says how. The reference is torch's `linear` on `kernels.coded_weight.decode`.

A tile of weights is the first operand of the product, because tensor cores take that one from registers. All inputs of
an output are added up in their order. For few rows their sum is divided into parts, so that small layers keep a whole
GPU busy. A row has the same bits in any batch as long as the batches have the same tile; with ``batch_invariant`` there
is only one, which divides nothing.

For many rows the weights are decoded into memory, and cuBLAS multiplies: see coded_decode.py.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import nn

from kernels.coded_weight import CodedWeight
from kernels.linear.coded_decode import OUTPUTS_MULTIPLE, decode_outputs, decode_rows
from kernels.linear.coded_sections import CodedSection
from kernels.linear.coded_tiles import add_block, add_rounded_block, coded_constants
from kernels.shared_memory import has_large_shared_memory

__all__ = ["CodedTritonLinear", "add_parts"]


@dataclass(frozen=True)
class _Tile:
    """How many rows and outputs a program computes, how it is compiled, and how sums are divided.

    Attributes:
        num_programs: which keep a GPU busy: sums are divided until there are as many; 0: they are not.
        max_registers: of a thread; None: ptxas chooses.
        is_rounded: weights are rounded to the dtype of activations, which takes half the registers of a sum.
    """

    num_rows: int
    num_outputs: int
    num_warps: int
    num_stages: int
    num_programs: int = 0
    max_registers: int | None = None
    is_rounded: bool = False


# Chosen by an H200's times. With fewer outputs than 64 tensor cores get their older instructions, for few rows as
# well. With more outputs activations are read less often, which the second-level cache is busy with from 64 rows on.
_FEW_ROWS = _Tile(16, 32, 2, 3, num_programs=1024)
_FEW_ROWS_AND_MINIMA = _Tile(16, 64, 4, 3, num_programs=1024)
_FEW_ROWS_OF_4_BITS = _Tile(16, 64, 4, 3, num_programs=512)
_SOME_ROWS = _Tile(64, 128, 8, 3, num_programs=256)
_SOME_ROWS_ROUNDED = _Tile(64, 128, 8, 3, num_programs=256, is_rounded=True)
_MANY_ROWS = _Tile(128, 128, 8, 3, num_programs=192, is_rounded=True)
_ANY_ROWS = _Tile(64, 64, 4, 4)  # where a row is to have the same bits in any batch
# With float32 ptxas spills a few registers, so as to run more programs at a time, unless it is told how many there are.
_FLOAT32 = _Tile(16, 64, 8, 2, num_programs=256, max_registers=240)
_MOST_PARTS = 8  # of a sum
_INPUTS_OF_A_PART = 256  # at least
_SUMMED = 1024  # outputs of a program that adds up parts
# Rows up to which weights are decoded in registers, by the tile for the most of them; for more rows they are decoded
# into memory. Of small groups, which have more scales, a second tile takes longer on an H200 than decoding into memory.
_ROWS_OF_SMALL_GROUPS, _ROWS, _ROWS_ROUNDED = 64, 128, 256
_SMALL_GROUP, _LARGE_GROUP = 32, 128  # inputs


# The number of rows changes from step to step, which must not wait for a compilation.
@triton.jit(do_not_specialize=["num_rows"])
def coded_linear_kernel(
    output,  # [num_rows, num_outputs], its rows output_stride apart; of parts float32 [PARTS, num_rows, num_outputs]
    rows,  # [num_rows, num_inputs]
    codes,  # of CodedSection, as all that follow but the bias
    outer_scales,
    outer_minima,
    zero_points,
    inner_scales,
    inner_minima,
    output_scales,
    bias,  # [num_outputs], or None
    num_rows,
    num_outputs,
    num_inputs,
    num_blocks,
    blocks_per_part,  # of the sums
    row_stride,
    output_stride,
    ZERO: tl.constexpr,  # of `coded_constants`, as the next eight
    LOW_LEVELS: tl.constexpr,
    HIGH_LEVELS: tl.constexpr,
    FLOATS: tl.constexpr,
    INSTRUCTIONS: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_WORD: tl.constexpr,
    PARTS_PER_OUTER: tl.constexpr,
    IS_ROUNDED: tl.constexpr,  # weights are rounded to the dtype of activations
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """One program computes a tile of outputs, or a part of its sums. Neighbours share weights, which L2 then has."""
    num_row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    row = tl.program_id(0) % num_row_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) // num_row_tiles * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    has_row, has_column = row < num_rows, column < num_outputs
    first = tl.program_id(1) * blocks_per_part
    inputs = tl.arange(0, WIDTH)
    code_tile = codes + (first.to(tl.int64) * num_outputs + column[:, None]) * WIDTH + inputs[None, :]
    x_tile = rows + row[None, :].to(tl.int64) * row_stride + inputs[:, None]
    sums = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), dtype=tl.float32)
    for block in range(first, tl.minimum(first + blocks_per_part, num_blocks)):
        words = tl.load(code_tile, mask=has_column[:, None], other=0)
        if IS_ROUNDED:
            sums = add_rounded_block(
                sums,
                words,
                x_tile,
                has_row,
                block,
                column,
                has_column,
                num_outputs,
                num_inputs,
                outer_scales,
                outer_minima,
                zero_points,
                inner_scales,
                inner_minima,
                ZERO,
                LOW_LEVELS,
                HIGH_LEVELS,
                FLOATS,
                INSTRUCTIONS,
                BIAS,
                WIDTH,
                PER_WORD,
                PARTS_PER_OUTER,
            )
        else:
            sums = add_block(
                sums,
                words,
                x_tile,
                has_row,
                block,
                0,
                0,
                column,
                has_column,
                num_outputs,
                num_inputs,
                outer_scales,
                outer_minima,
                zero_points,
                inner_scales,
                inner_minima,
                ZERO,
                LOW_LEVELS,
                HIGH_LEVELS,
                FLOATS,
                INSTRUCTIONS,
                BIAS,
                WIDTH,
                PER_WORD,
                PARTS_PER_OUTER,
            )
        code_tile += num_outputs * WIDTH
    if output_scales is not None:
        sums *= tl.load(output_scales + column, mask=has_column, other=0.0)[:, None]
    if bias is not None:
        sums += tl.load(bias + column, mask=has_column, other=0.0).to(tl.float32)[:, None]
    target = output + (tl.program_id(1) * num_rows + row).to(tl.int64)[None, :] * output_stride + column[:, None]
    tl.store(target, sums.to(output.dtype.element_ty), mask=has_column[:, None] & has_row[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def add_parts_kernel(
    output,  # [num_rows, num_outputs], its rows output_stride apart
    parts,  # float32 [num_parts, num_rows, num_outputs], contiguous
    bias,  # [num_outputs], or None
    num_parts,
    num_rows,
    num_outputs,
    output_stride,
    BLOCK: tl.constexpr,
):
    """Add up the parts of BLOCK sums of one row, in their order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_outputs
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(num_parts):
        sums += tl.load(parts + (part * num_rows + row) * num_outputs + column, mask=mask, other=0.0)
    if bias is not None:
        sums += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + row * output_stride + column, sums.to(output.dtype.element_ty), mask=mask)


class CodedTritonLinear(nn.Module):
    """A linear layer on coded weights.

    Args:
        weight: on any device; its sections may have formats of their own.
        out_features: outputs; those that the weight lacks are zero.
        device: of the packed weights.
        batch_invariant: give a row the same bits in any batch, of any size.

    Attributes:
        bias: a parameter [out_features] on the device, or None, as at first.
        input_order: the input that each column of codes multiplies, int32 [in_features]; None: they are in order.
        scratch: memory of `coded_decode.scratch_of` for the weights of many rows; None: they are decoded in registers
            for any number of rows. It may be shared with layers that are computed before and after this one.
    """

    bias: torch.Tensor | None
    input_order: torch.Tensor | None

    def __init__(
        self, weight: CodedWeight, out_features: int, device: torch.device, *, batch_invariant: bool = False
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.sections[0].shape[1], out_features
        self.batch_invariant = batch_invariant
        self.scratch: torch.Tensor | None = None
        self.register_parameter("bias", None)
        order = None if weight.input_order is None else weight.input_order.to(device)
        self.register_parameter("input_order", None if order is None else nn.Parameter(order, requires_grad=False))
        counts = [matrix.shape[0] for matrix in weight.sections]
        counts[-1] += out_features - sum(counts)
        self.sections = nn.ModuleList(
            CodedSection(matrix, count, device, word_bytes=2)
            for matrix, count in zip(weight.sections, counts, strict=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features], in the dtype of ``x``."""
        rows = x.reshape(-1, self.in_features)
        if self.input_order is not None:
            rows = rows.index_select(1, self.input_order)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        output = rows.new_empty(len(rows), self.out_features)
        if not len(rows):
            return output.view(*x.shape[:-1], self.out_features)
        is_decoded = not self.batch_invariant and len(rows) > self._rows_in_registers(rows.dtype)
        scratch = self.scratch if is_decoded else None
        if scratch is not None and scratch.dtype == rows.dtype:
            self._multiply_decoded(output, rows, scratch)
        else:
            for section, own in self._sections_and_outputs():
                tile = _tile(rows, section, is_only_one=self.batch_invariant)
                _multiply(output[:, own], rows, section, None if self.bias is None else self.bias[own], tile)
        return output.view(*x.shape[:-1], self.out_features)

    def _rows_in_registers(self, dtype: torch.dtype) -> int:
        """Return the rows up to which weights are decoded in registers."""
        return min(_tiles(section, dtype)[-1][0] for section, _ in self._sections_and_outputs())

    def _sections_and_outputs(self) -> Iterator[tuple[CodedSection, slice]]:
        first = 0
        for section in self.sections:
            assert isinstance(section, CodedSection)
            yield section, slice(first, first + section.out_features)
            first += section.out_features

    def _multiply_decoded(self, output: torch.Tensor, rows: torch.Tensor, scratch: torch.Tensor) -> None:
        """Decode as many outputs as ``scratch`` has memory for, and multiply them with all rows, until all are."""
        most = len(scratch) // self.in_features
        if most < self.out_features:
            most -= most % OUTPUTS_MULTIPLE
        for first in range(0, self.out_features, most):
            stop = min(first + most, self.out_features)
            weight = scratch[: (stop - first) * self.in_features].view(stop - first, self.in_features)
            for section, own in self._sections_and_outputs():
                start, end = max(first, own.start), min(stop, own.stop)
                if start < end:
                    decode_outputs(weight[start - first : end - first], section, start - own.start)
            if self.bias is None:
                torch.mm(rows, weight.t(), out=output[:, first:stop])
            else:
                torch.addmm(self.bias[first:stop], rows, weight.t(), out=output[:, first:stop])

    def look_up(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows of the weight, as an embedding does: [len(ids), in_features] of ``dtype``.

        Args:
            ids: int64 [any], from 0 to ``out_features`` - 1.
            dtype: of the result.
        """
        (section,) = self.sections
        assert isinstance(section, CodedSection)
        assert self.input_order is None
        return decode_rows(section, ids.contiguous(), dtype)

    def compile_kernels(self, dtype: torch.dtype) -> None:
        """Launch what any number of rows of ``dtype`` launches."""
        device = next(self.parameters()).device
        sections = [section for section, _ in self._sections_and_outputs()]
        most = {most_rows for section in sections for most_rows, _ in _tiles(section, dtype)}
        for num_rows in (1, *(rows + 1 for rows in sorted(most))):
            self(torch.zeros(num_rows, self.in_features, dtype=dtype, device=device))


def _tile(rows: torch.Tensor, section: CodedSection, *, is_only_one: bool) -> _Tile:
    tiles = _tiles(section, rows.dtype)
    if is_only_one:
        return replace(_FLOAT32, num_programs=0) if rows.dtype == torch.float32 else _ANY_ROWS
    return next((tile for most_rows, tile in tiles if len(rows) <= most_rows), tiles[-1][1])


def _tiles(section: CodedSection, dtype: torch.dtype) -> list[tuple[int, _Tile]]:
    """Return the tiles of a section's products, each after the most rows that it is taken for."""
    is_small = section.layout.group <= _SMALL_GROUP
    if dtype.itemsize == 4:
        return [(_ROWS_OF_SMALL_GROUPS if is_small else _ROWS, _FLOAT32)]
    few = _few_rows(section)
    if is_small:
        return [(few.num_rows, few), (_ROWS_OF_SMALL_GROUPS, _SOME_ROWS_ROUNDED)]
    some = _SOME_ROWS if section.layout.group >= _LARGE_GROUP else _SOME_ROWS_ROUNDED
    tiles = [(few.num_rows, few), (some.num_rows, some)]
    # Scales of another dtype are converted, which takes longer than the second sum of a tile that is not rounded.
    is_rounded = section.outer_scales.dtype == dtype and section.outer_minima is None
    if is_rounded and has_large_shared_memory(section.codes.device):
        return [*tiles, (_ROWS_ROUNDED, _MANY_ROWS)]
    return [*tiles, (_ROWS, some)]


def _few_rows(section: CodedSection) -> _Tile:
    if section.outer_minima is not None:
        return _FEW_ROWS_AND_MINIMA
    form, is_small = section.layout.format, section.layout.group <= _SMALL_GROUP
    is_plain = form.bits == 4 and not form.levels and section.zero_points is None
    return _FEW_ROWS_OF_4_BITS if is_plain and not is_small else _FEW_ROWS


def _blocks_per_part(section: CodedSection, tile: _Tile) -> int:
    """Return of how many blocks a program adds up the inputs. Of the rows, it depends only on their tile."""
    if not tile.num_programs:
        return section.layout.num_blocks
    num_tiles = -(-section.out_features // tile.num_outputs)
    most = min(_MOST_PARTS, max(1, section.layout.in_features // _INPUTS_OF_A_PART))
    return -(-section.layout.num_blocks // min(most, -(-tile.num_programs // num_tiles)))


def _multiply(
    output: torch.Tensor, rows: torch.Tensor, section: CodedSection, bias: torch.Tensor | None, tile: _Tile
) -> None:
    """Set ``output`` [num_rows, out_features] to the product of ``rows`` with a section's weights, plus ``bias``."""
    num_rows, num_outputs = output.shape
    blocks_per_part = _blocks_per_part(section, tile)
    num_parts = triton.cdiv(section.layout.num_blocks, blocks_per_part)
    target = output if num_parts == 1 else rows.new_empty(num_parts, num_rows, num_outputs, dtype=torch.float32)
    num_tiles = triton.cdiv(num_rows, tile.num_rows) * triton.cdiv(num_outputs, tile.num_outputs)
    coded_linear_kernel[num_tiles, num_parts](
        target,
        rows,
        section.codes,
        section.outer_scales,
        section.outer_minima,
        section.zero_points,
        section.inner_scales,
        section.inner_minima,
        section.output_scales,
        bias if num_parts == 1 else None,
        num_rows,
        num_outputs,
        section.layout.in_features,
        section.layout.num_blocks,
        blocks_per_part,
        rows.stride(0),
        target.stride(-2),
        **coded_constants(section.layout, rows.dtype),
        IS_ROUNDED=tile.is_rounded,
        BLOCK_ROWS=tile.num_rows,
        BLOCK_OUTPUTS=tile.num_outputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.max_registers,
        enable_fp_fusion=True,
    )
    if num_parts > 1:
        add_parts(output, target, bias)


def add_parts(output: torch.Tensor, parts: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Set ``output`` [num_rows, num_outputs] to the sums of float32 parts [num_parts, num_rows, num_outputs] + bias."""
    num_parts, num_rows, num_outputs = parts.shape
    add_parts_kernel[num_rows, triton.cdiv(num_outputs, _SUMMED)](
        output,
        parts,
        bias,
        num_parts,
        num_rows,
        num_outputs,
        output.stride(0),
        BLOCK=_SUMMED,
        enable_fp_fusion=True,
    )
