"""The product of experts on codes in Triton: a program decodes its weights in registers, and reads no others.

It is `grouped_linear_kernel` of experts.py with the tiles of kernels/linear/coded_tiles.py, in which weights are the
first operand. Of a gated product a tile has outputs of the gate and the same ones of up. The reference is the same
product with the weights of `kernels.coded_weight.decode`.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.experts.coded_stack import CodedStack
from kernels.experts.triton.activation import gated_product
from kernels.experts.triton.routing import TILE_ROWS, Routes
from kernels.linear.coded_tiles import add_block, coded_constants

__all__ = ["coded_tile_rows", "grouped_coded_linear", "most_rows_of_tiles"]


@dataclass(frozen=True)
class _Tile:
    """How many outputs a program multiplies with, a gate's and up's together, and how it is compiled."""

    num_outputs: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread; None: ptxas chooses


# By the bytes of an activation and the rows of a tile. Linear layers on codes are slower with more rows on an H200.
# ptxas spills a few registers, so as to run more programs at a time, unless it is told how many it may use. In float32,
# without tensor cores, a thread keeps whole rows of a tile, and has none left for further stages.
_FLOAT32 = _Tile(16, 8, 1, max_registers=255)
_TILES = {
    2: {16: _Tile(64, 4, 3), TILE_ROWS: _Tile(64, 4, 4, max_registers=255)},
    4: {16: _FLOAT32, TILE_ROWS: _FLOAT32},
}


# The number of tokens changes from step to step, and a step must not wait for a compilation.
@triton.jit(do_not_specialize=["num_tokens"])
def grouped_coded_linear_kernel(
    output,  # [num_pairs, num_outputs], contiguous
    rows,  # [num_pairs // PAIRS_PER_ROW, num_inputs], contiguous
    codes,  # of CodedStack, as all that follow; if gated, each expert's gate before its up
    outer_scales,
    outer_minima,
    zero_points,
    inner_scales,
    inner_minima,
    output_scales,
    pairs,  # of Routes, as the next three
    num_pairs,
    tile_experts,
    tile_starts,
    row_weights,  # float32 [num_pairs], factors of the rows; or None
    num_tokens,
    num_outputs,
    num_inputs,
    num_blocks,
    num_outers,
    PAIRS_PER_ROW: tl.constexpr,
    GATED: tl.constexpr,  # the output is the activated gate * up
    IS_GELU: tl.constexpr,  # else the activation is SiLU
    ZERO: tl.constexpr,  # of `coded_constants`, as the next eight
    LOW_LEVELS: tl.constexpr,
    HIGH_LEVELS: tl.constexpr,
    FLOATS: tl.constexpr,
    INSTRUCTIONS: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_WORD: tl.constexpr,
    PARTS_PER_OUTER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """One program computes a tile of outputs. Neighbours are tiles of an expert, whose codes the L2 cache then has."""
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert >= 0:
        at = tl.load(tile_starts + tile) + tl.arange(0, BLOCK_ROWS)
        is_row = at < tl.load(num_pairs + expert)
        pair = tl.load(pairs + expert * num_tokens + at, mask=is_row, other=0).to(tl.int64)
        all_outputs = num_outputs * (2 if GATED else 1)
        tile_outputs: tl.constexpr = BLOCK_OUTPUTS // 2 if GATED else BLOCK_OUTPUTS
        lane = tl.arange(0, BLOCK_OUTPUTS)
        own = tl.program_id(1) * tile_outputs + lane % tile_outputs
        column = own + lane // tile_outputs * num_outputs
        has_column = own < num_outputs
        inputs = tl.arange(0, WIDTH)
        first_block = expert * num_blocks
        code_tile = codes + (first_block * all_outputs + column[:, None]) * WIDTH + inputs[None, :]
        x_tile = rows + pair[None, :] // PAIRS_PER_ROW * num_inputs + inputs[:, None]
        sums = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), dtype=tl.float32)
        for block in range(num_blocks):
            sums = add_block(
                sums,
                tl.load(code_tile, mask=has_column[:, None], other=0),
                x_tile,
                is_row,
                block,
                expert * num_outers,
                first_block * PER_WORD,
                column,
                has_column,
                all_outputs,
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
            code_tile += all_outputs * WIDTH
        if output_scales is not None:
            scale = tl.load(output_scales + expert * all_outputs + column, mask=has_column, other=0.0)
            sums *= scale[:, None]
        if row_weights is not None:
            sums *= tl.load(row_weights + pair, mask=is_row, other=0.0)[None, :]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(sums, (2, tile_outputs, BLOCK_ROWS)), (1, 2, 0)))
            sums = gated_product(gate, up, IS_GELU)
        column = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
        target = output + pair[None, :] * num_outputs + column[:, None]
        is_output = (column < num_outputs)[:, None] & is_row[None, :]
        tl.store(target, sums.to(output.dtype.element_ty), mask=is_output)


def most_rows_of_tiles(dtype: torch.dtype) -> list[int]:
    """Return how many rows an expert has on average at most for each size of tiles, but the largest."""
    return sorted(_TILES[dtype.itemsize])[:-1]


def coded_tile_rows(num_rows: float, dtype: torch.dtype) -> int:
    """Return the rows of a tile for experts that have ``num_rows`` on average, so that few are multiplied in vain."""
    sizes = _TILES[dtype.itemsize]
    return next((size for size in sizes if num_rows <= size), max(sizes))


def grouped_coded_linear(
    rows: torch.Tensor,
    stack: CodedStack,
    routes: Routes,
    *,
    gated: bool,
    is_gelu: bool = False,
    row_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return each pair's row times its expert's weights, [num_pairs, num_outputs]; a row may serve several pairs.

    Args:
        row_weights: float32 [num_tokens, top_k], contiguous, factors of each pair's row; None: 1.
    """
    assert rows.is_contiguous()
    num_outputs, num_pairs, layout = stack.out_features // (2 if gated else 1), routes.ids.numel(), stack.layout
    output = rows.new_empty(num_pairs, num_outputs)
    tile = _TILES[rows.element_size()][routes.tile_rows]
    num_tiles = triton.cdiv(num_outputs, tile.num_outputs // (2 if gated else 1))
    grouped_coded_linear_kernel[len(routes.tile_experts), num_tiles](
        output,
        rows,
        stack.codes,
        stack.outer_scales,
        stack.outer_minima,
        stack.zero_points,
        stack.inner_scales,
        stack.inner_minima,
        stack.output_scales,
        routes.pairs,
        routes.num_pairs,
        routes.tile_experts,
        routes.tile_starts,
        row_weights,
        len(routes.ids),
        num_outputs,
        layout.in_features,
        layout.num_blocks,
        layout.num_outers,
        PAIRS_PER_ROW=num_pairs // len(rows),
        GATED=gated,
        IS_GELU=is_gelu,
        **coded_constants(layout, rows.dtype),
        BLOCK_ROWS=routes.tile_rows,
        BLOCK_OUTPUTS=tile.num_outputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.max_registers,
        enable_fp_fusion=True,
    )
    return output
