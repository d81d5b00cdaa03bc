"""The product of a tile of coded weights with activations, and their decoding, which our Triton kernels share.

Codes become the levels that they stand for, which every dtype has exactly, and are multiplied as these. The sums of the
inputs that share a scale are multiplied by it in float32, so weights are not rounded to the dtype, as dequantised ones
are. A minimum is multiplied by the sum of the activations.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.linear.coded_levels import instructions, levels_of
from kernels.linear.coded_sections import CodedLayout

__all__ = ["add_block", "add_rounded_block", "coded_constants", "decoded_part"]

_IS_INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _factors(
    outer_row,
    inner_row,
    column,
    has_column,
    num_outputs,
    outer,
    inner,
):
    """Return the scales or the minima of a part, float32 [BLOCK_OUTPUTS]."""
    factor = tl.load(outer + outer_row * num_outputs + column, mask=has_column, other=0.0)
    factor = factor.to(tl.float32)
    if inner is not None:
        factor *= tl.load(inner + inner_row * num_outputs + column, mask=has_column, other=0).to(tl.float32)
    return factor


@triton.jit
def _zeros(outer_row, column, has_column, num_outputs, zero_points, outer_minima, ZERO: tl.constexpr):
    """Return what is subtracted from the levels of a part, float32 [BLOCK_OUTPUTS]."""
    zero = tl.zeros_like(column).to(tl.float32)
    if zero_points is not None:
        at = zero_points + outer_row * num_outputs + column
        zero = tl.load(at, mask=has_column, other=0).to(tl.float32)
    elif outer_minima is None:
        zero += ZERO
    return zero


@triton.jit
def add_block(
    sums,  # float32 [BLOCK_OUTPUTS, BLOCK_ROWS]
    words,  # [BLOCK_OUTPUTS, WIDTH], the block's codes
    x_tile,  # where the rows have their inputs, [WIDTH, BLOCK_ROWS]: of the first part
    has_row,  # [BLOCK_ROWS]
    block,
    first_outer,  # row of the outer factors at which the matrix begins; 0 of a single matrix
    first_inner,  # likewise of the inner ones
    column,  # [BLOCK_OUTPUTS], which outputs they are
    has_column,
    num_outputs,
    num_inputs,
    outer_scales,  # of CodedSection, as the next four
    outer_minima,
    zero_points,
    inner_scales,
    inner_minima,
    ZERO: tl.constexpr,  # of `coded_constants`, as all that follow
    LOW_LEVELS: tl.constexpr,
    HIGH_LEVELS: tl.constexpr,
    FLOATS: tl.constexpr,
    INSTRUCTIONS: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_WORD: tl.constexpr,
    PARTS_PER_OUTER: tl.constexpr,
):
    """Return the sums with the products of a block's inputs, not yet multiplied by the outputs' own scales."""
    inputs = tl.arange(0, WIDTH)
    # Neighbouring parts of a word that have one scale are added up before they are multiplied by it.
    shared: tl.constexpr = PARTS_PER_OUTER if PER_WORD % PARTS_PER_OUTER == 0 else 1
    together: tl.constexpr = PER_WORD if PARTS_PER_OUTER % PER_WORD == 0 else shared
    count: tl.constexpr = together if inner_scales is None else 1
    levels = tl.zeros_like(sums)
    # Tensor cores add up the activations that a minimum is multiplied by: each output has their sum.
    activations = tl.zeros_like(sums)
    for part in tl.static_range(PER_WORD):
        index = block * PER_WORD + part
        outer_row, inner_row = first_outer + index // PARTS_PER_OUTER, first_inner + index
        zero = _zeros(outer_row, column, has_column, num_outputs, zero_points, outer_minima, ZERO)
        is_input = inputs < num_inputs - index * WIDTH
        x = tl.load(x_tile + index * WIDTH, mask=is_input[:, None] & has_row[None, :], other=0.0)
        level = levels_of(words, zero, part, PER_WORD, LOW_LEVELS, HIGH_LEVELS, FLOATS, INSTRUCTIONS, BIAS, x.dtype)
        levels = tl.dot(level, x, levels, input_precision="ieee")
        if outer_minima is not None:
            activations = tl.dot(tl.full(level.shape, 1.0, x.dtype), x, activations, input_precision="ieee")
        if part % count == count - 1:
            scale = _factors(outer_row, inner_row, column, has_column, num_outputs, outer_scales, inner_scales)
            sums += scale[:, None] * levels
            if outer_minima is not None:
                minimum = _factors(outer_row, inner_row, column, has_column, num_outputs, outer_minima, inner_minima)
                sums -= minimum[:, None] * activations
            levels = tl.zeros_like(sums)
            activations = tl.zeros_like(sums)
    return sums


@triton.jit
def decoded_part(
    words,  # [BLOCK_OUTPUTS, WIDTH], the block's codes
    PART: tl.constexpr,  # of the block
    block,
    column,  # [BLOCK_OUTPUTS], which outputs they are
    has_column,
    num_outputs,
    outer_scales,  # of CodedSection, as the next five
    outer_minima,
    zero_points,
    inner_scales,
    inner_minima,
    output_scales,
    ZERO: tl.constexpr,  # of `coded_constants`, as all but the last
    LOW_LEVELS: tl.constexpr,
    HIGH_LEVELS: tl.constexpr,
    FLOATS: tl.constexpr,
    INSTRUCTIONS: tl.constexpr,
    BIAS: tl.constexpr,
    PER_WORD: tl.constexpr,
    PARTS_PER_OUTER: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return the weights of one part of a block in DTYPE, [BLOCK_OUTPUTS, WIDTH]."""
    index = block * PER_WORD + PART
    outer_row = index // PARTS_PER_OUTER
    zero = _zeros(outer_row, column, has_column, num_outputs, zero_points, outer_minima, ZERO)
    level = levels_of(words, zero, PART, PER_WORD, LOW_LEVELS, HIGH_LEVELS, FLOATS, INSTRUCTIONS, BIAS, DTYPE)
    scale = _factors(outer_row, index, column, has_column, num_outputs, outer_scales, inner_scales)
    weight = scale[:, None] * level.to(tl.float32)
    if outer_minima is not None:
        minimum = _factors(outer_row, index, column, has_column, num_outputs, outer_minima, inner_minima)
        weight -= minimum[:, None]
    if output_scales is not None:
        weight *= tl.load(output_scales + column, mask=has_column, other=0.0)[:, None]
    return weight.to(DTYPE)


@triton.jit
def add_rounded_block(
    sums,  # float32 [BLOCK_OUTPUTS, BLOCK_ROWS]
    words,  # as of add_block, like all that follow
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
    ZERO: tl.constexpr,
    LOW_LEVELS: tl.constexpr,
    HIGH_LEVELS: tl.constexpr,
    FLOATS: tl.constexpr,
    INSTRUCTIONS: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_WORD: tl.constexpr,
    PARTS_PER_OUTER: tl.constexpr,
):
    """Return what `add_block` does, with weights that are rounded to the dtype of the activations."""
    inputs = tl.arange(0, WIDTH)
    for part in tl.static_range(PER_WORD):
        first = (block * PER_WORD + part) * WIDTH
        is_input = inputs < num_inputs - first
        x = tl.load(x_tile + first, mask=is_input[:, None] & has_row[None, :], other=0.0)
        weight = decoded_part(
            words,
            part,
            block,
            column,
            has_column,
            num_outputs,
            outer_scales,
            outer_minima,
            zero_points,
            inner_scales,
            inner_minima,
            None,
            ZERO,
            LOW_LEVELS,
            HIGH_LEVELS,
            FLOATS,
            INSTRUCTIONS,
            BIAS,
            PER_WORD,
            PARTS_PER_OUTER,
            x.dtype,
        )
        sums = tl.dot(weight, x, sums, input_precision="ieee")
    return sums


@cache
def coded_constants(layout: CodedLayout, dtype: torch.dtype) -> dict[str, Any]:
    """Return what kernels know at compile time of a layout, for activations of ``dtype``.

    ZERO is subtracted from each level. LOW_LEVELS are those of the codes 0 to 7, a byte each, and HIGH_LEVELS of 8 to
    15; None: the codes are the levels. FLOATS says which floats the codes are, or is None. INSTRUCTIONS and BIAS are
    what `instructions` returns.
    """
    levels = layout.format.levels
    low, high = (int.from_bytes(bytes(levels[start : start + 8]), "little", signed=True) for start in (0, 8))
    chosen: tuple[tuple[str | None, ...], float] = (layout.per_word * (None,), 0.0)
    if not _IS_INTERPRETED:
        chosen = instructions(layout.format, layout.per_word, layout.word_bytes, dtype)
    return {
        "ZERO": layout.format.zero,
        "LOW_LEVELS": low if levels else None,
        "HIGH_LEVELS": high if levels else None,
        "FLOATS": layout.format.floats,
        "INSTRUCTIONS": chosen[0],
        "BIAS": chosen[1],
        "WIDTH": layout.width,
        "PER_WORD": layout.per_word,
        "PARTS_PER_OUTER": layout.parts_per_outer,
    }
