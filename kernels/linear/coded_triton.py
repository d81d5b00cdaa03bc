"""A linear layer in Triton on weights that stay codes: a program decodes its weights in registers and multiplies.

Codes become the levels that they stand for, which every dtype has exactly, and are multiplied as these. The sums of the
inputs that share a scale are multiplied by it in float32, so weights are not rounded to the dtype, as dequantised ones
are. A minimum is multiplied by the sum of the activations. The reference is torch's `linear` on
`kernels.coded_weight.decode`.

A tile of weights is the first operand of the product, because tensor cores take that one from registers. All inputs of
an output are added up in their order. For few rows their sum is divided into parts, so that small layers keep a whole
GPU busy. A row has the same bits in any batch as long as the batches have the same tile; with ``batch_invariant`` there
is only one, which divides nothing.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from kernels.coded_weight import CodedWeight
from kernels.linear.coded_levels import instructions, levels_of
from kernels.linear.coded_sections import CodedSection

__all__ = ["CodedTritonLinear"]


@dataclass(frozen=True)
class _Tile:
    """How many rows and outputs a program computes, how it is compiled, and how sums are divided.

    Attributes:
        num_programs: which keep a GPU busy: sums are divided until there are as many; 0: they are not.
        max_registers: of a thread; None: ptxas chooses.
    """

    num_rows: int
    num_outputs: int
    num_warps: int
    num_stages: int
    num_programs: int = 0
    max_registers: int | None = None


# By the bytes of an activation: for few rows, and for any number. Measured on an H200. With float32 ptxas spills a few
# registers, so as to run more programs at a time, unless it is told how many a thread may have.
_TILES = {
    2: (_Tile(16, 64, 4, 3, num_programs=1024), _Tile(64, 64, 4, 4, num_programs=256)),
    4: (_Tile(16, 64, 8, 2, num_programs=256, max_registers=200),) * 2,
}
_MOST_PARTS = 8  # of a sum
_INPUTS_OF_A_PART = 256  # at least
_SUMMED = 1024  # outputs of a program that adds up parts
_IS_INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _factors(
    index,  # of a part
    column,
    has_column,
    num_outputs,
    outer,
    inner,
    PARTS_PER_OUTER: tl.constexpr,
):
    """Return the scales or the minima of a part, float32 [BLOCK_OUTPUTS]."""
    factor = tl.load(outer + index // PARTS_PER_OUTER * num_outputs + column, mask=has_column, other=0.0)
    factor = factor.to(tl.float32)
    if inner is not None:
        factor *= tl.load(inner + index * num_outputs + column, mask=has_column, other=0).to(tl.float32)
    return factor


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
    ZERO: tl.constexpr,  # what is subtracted from each level
    LOW_LEVELS: tl.constexpr,  # of `levels_of`, as the next ones
    HIGH_LEVELS: tl.constexpr,
    FLOATS: tl.constexpr,
    INSTRUCTIONS: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_BYTE: tl.constexpr,
    PARTS_PER_OUTER: tl.constexpr,
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
    # Parts of a byte that have one scale are added up before they are multiplied by it.
    one_scale: tl.constexpr = PARTS_PER_OUTER % PER_BYTE == 0 and inner_scales is None
    for block in range(first, tl.minimum(first + blocks_per_part, num_blocks)):
        octets = tl.load(code_tile, mask=has_column[:, None], other=0)
        levels = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), dtype=tl.float32)
        # Tensor cores add up the activations that a minimum is multiplied by: each output has their sum.
        activations = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), dtype=tl.float32)
        for part in tl.static_range(PER_BYTE):
            index = block * PER_BYTE + part
            zero = tl.full((BLOCK_OUTPUTS,), 0.0, tl.float32)
            if zero_points is not None:
                at = zero_points + index // PARTS_PER_OUTER * num_outputs + column
                zero = tl.load(at, mask=has_column, other=0).to(tl.float32)
            elif outer_minima is None:
                zero += ZERO
            is_input = inputs < num_inputs - index * WIDTH
            x = tl.load(x_tile + index * WIDTH, mask=is_input[:, None] & has_row[None, :], other=0.0)
            level = levels_of(
                octets, zero, part, PER_BYTE, LOW_LEVELS, HIGH_LEVELS, FLOATS, INSTRUCTIONS, BIAS, x.dtype
            )
            levels = tl.dot(level, x, levels, input_precision="ieee")
            if outer_minima is not None:
                ones = tl.full((BLOCK_OUTPUTS, WIDTH), 1.0, x.dtype)
                activations = tl.dot(ones, x, activations, input_precision="ieee")
            if not one_scale or part == PER_BYTE - 1:
                scale = _factors(index, column, has_column, num_outputs, outer_scales, inner_scales, PARTS_PER_OUTER)
                sums += scale[:, None] * levels
                if outer_minima is not None:
                    minimum = _factors(
                        index, column, has_column, num_outputs, outer_minima, inner_minima, PARTS_PER_OUTER
                    )
                    sums -= minimum[:, None] * activations
                levels = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), dtype=tl.float32)
                activations = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), dtype=tl.float32)
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
    """

    bias: torch.Tensor | None
    input_order: torch.Tensor | None

    def __init__(
        self, weight: CodedWeight, out_features: int, device: torch.device, *, batch_invariant: bool = False
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.sections[0].shape[1], out_features
        self.batch_invariant = batch_invariant
        self.register_parameter("bias", None)
        order = None if weight.input_order is None else weight.input_order.to(device)
        self.register_parameter("input_order", None if order is None else nn.Parameter(order, requires_grad=False))
        counts = [matrix.shape[0] for matrix in weight.sections]
        counts[-1] += out_features - sum(counts)
        self.sections = nn.ModuleList(
            CodedSection(matrix, count, device) for matrix, count in zip(weight.sections, counts, strict=True)
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
        tile, first = _tile(rows, is_only_one=self.batch_invariant), 0
        for section in self.sections:
            assert isinstance(section, CodedSection)
            own = slice(first, first + section.out_features)
            _multiply(output[:, own], rows, section, None if self.bias is None else self.bias[own], tile)
            first = own.stop
        return output.view(*x.shape[:-1], self.out_features)

    def compile_kernels(self, dtype: torch.dtype) -> None:
        """Launch what any number of rows of ``dtype`` launches."""
        device = next(self.parameters()).device
        for num_rows in (1, _TILES[dtype.itemsize][0].num_rows + 1):
            self(torch.zeros(num_rows, self.in_features, dtype=dtype, device=device))


def _tile(rows: torch.Tensor, *, is_only_one: bool) -> _Tile:
    few, any_number = _TILES[rows.element_size()]
    if is_only_one:
        return replace(any_number, num_programs=0)
    return few if len(rows) <= few.num_rows else any_number


def _blocks_per_part(section: CodedSection, tile: _Tile) -> int:
    """Return of how many blocks a program adds up the inputs. Of the rows, it depends only on their tile."""
    if not tile.num_programs:
        return section.num_blocks
    num_tiles = -(-section.out_features // tile.num_outputs)
    most = min(_MOST_PARTS, max(1, section.in_features // _INPUTS_OF_A_PART))
    return -(-section.num_blocks // min(most, -(-tile.num_programs // num_tiles)))


def _multiply(
    output: torch.Tensor, rows: torch.Tensor, section: CodedSection, bias: torch.Tensor | None, tile: _Tile
) -> None:
    """Set ``output`` [num_rows, out_features] to the product of ``rows`` with a section's weights, plus ``bias``."""
    num_rows, num_outputs = output.shape
    blocks_per_part = _blocks_per_part(section, tile)
    num_parts = triton.cdiv(section.num_blocks, blocks_per_part)
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
        section.in_features,
        section.num_blocks,
        blocks_per_part,
        rows.stride(0),
        target.stride(-2),
        **_constants(section, rows.dtype),
        BLOCK_ROWS=tile.num_rows,
        BLOCK_OUTPUTS=tile.num_outputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.max_registers,
        enable_fp_fusion=True,
    )
    if num_parts > 1:
        add_parts_kernel[num_rows, triton.cdiv(num_outputs, _SUMMED)](
            output,
            target,
            bias,
            num_parts,
            num_rows,
            num_outputs,
            output.stride(0),
            BLOCK=_SUMMED,
            enable_fp_fusion=True,
        )


def _constants(section: CodedSection, dtype: torch.dtype) -> dict[str, Any]:
    levels = section.format.levels
    low, high = (int.from_bytes(bytes(levels[start : start + 8]), "little", signed=True) for start in (0, 8))
    chosen, bias = (
        (section.per_byte * (None,), 0.0) if _IS_INTERPRETED else instructions(section.format, section.per_byte, dtype)
    )
    return {
        "ZERO": section.format.zero,
        "LOW_LEVELS": low if levels else None,
        "HIGH_LEVELS": high if levels else None,
        "FLOATS": section.format.floats,
        "INSTRUCTIONS": chosen,
        "BIAS": bias,
        "WIDTH": section.width,
        "PER_BYTE": section.per_byte,
        "PARTS_PER_OUTER": section.parts_per_outer,
    }
