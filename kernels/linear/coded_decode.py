"""Decode a coded weight into memory in Triton, for a product with so many rows that cuBLAS is faster.

Decoding reads 0.5 bytes of a weight of 4 bits and writes 2 in bfloat16. By the data sheet of an H100 that takes half as
long as the product with 600 rows, and a thirtieth of that with 8,192. The reference is `kernels.coded_weight.decode`.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from kernels.linear.coded_sections import CodedSection
from kernels.linear.coded_tiles import coded_constants, decoded_part

__all__ = ["OUTPUTS_MULTIPLE", "decode_outputs", "decode_rows", "scratch_of"]

OUTPUTS_MULTIPLE = 128  # of the outputs that are decoded at once, if not all: cuBLAS has such tiles
_SCRATCH_BYTES = 128 * 2**20  # of decoded weights; a larger weight is multiplied in parts
_CODES = 4096  # bytes that a program decodes
_LEAST_OUTPUTS = 16


@triton.jit(do_not_specialize=["first_output", "num_decoded"], do_not_specialize_on_alignment=["indices"])
def decode_kernel(
    weight,  # [num_decoded, num_inputs], contiguous
    codes,  # of CodedSection, as all that follow
    outer_scales,
    outer_minima,
    zero_points,
    inner_scales,
    inner_minima,
    output_scales,
    indices,  # int64 [num_decoded], of the outputs that are decoded; None: they are neighbours
    first_output,  # of these
    num_decoded,
    num_outputs,
    num_inputs,
    ZERO: tl.constexpr,  # of `coded_constants`, as the next eight
    LOW_LEVELS: tl.constexpr,
    HIGH_LEVELS: tl.constexpr,
    FLOATS: tl.constexpr,
    INSTRUCTIONS: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_WORD: tl.constexpr,
    PARTS_PER_OUTER: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """One program decodes a block of some outputs. Its neighbours write the next inputs of the same outputs."""
    block = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_decoded = row < num_decoded
    column = first_output + row
    if indices is not None:
        column = tl.load(indices + row, mask=is_decoded, other=0).to(tl.int32)
    inputs = tl.arange(0, WIDTH)
    code_tile = codes + (block.to(tl.int64) * num_outputs + column[:, None]) * WIDTH + inputs[None, :]
    words = tl.load(code_tile, mask=is_decoded[:, None], other=0)
    target = weight + row[:, None].to(tl.int64) * num_inputs + inputs[None, :]
    for part in tl.static_range(PER_WORD):
        decoded = decoded_part(
            words,
            part,
            block,
            column,
            is_decoded,
            num_outputs,
            outer_scales,
            outer_minima,
            zero_points,
            inner_scales,
            inner_minima,
            output_scales,
            ZERO,
            LOW_LEVELS,
            HIGH_LEVELS,
            FLOATS,
            INSTRUCTIONS,
            BIAS,
            PER_WORD,
            PARTS_PER_OUTER,
            weight.dtype.element_ty,
        )
        first = (block * PER_WORD + part) * WIDTH
        mask = is_decoded[:, None] & (inputs < num_inputs - first)[None, :]
        tl.store(target + first, decoded, mask=mask)


def decode_outputs(weight: torch.Tensor, section: CodedSection, first_output: int) -> None:
    """Set ``weight`` [num_decoded, in_features], contiguous, to the weights of outputs from ``first_output`` on."""
    _decode(weight, section, None, first_output, max(_CODES // section.layout.width, _LEAST_OUTPUTS))


def decode_rows(section: CodedSection, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights of some outputs, as an embedding looks up rows: [len(ids), in_features] of ``dtype``.

    The reference is ``decode(matrix)[ids]``.

    Args:
        section: all outputs.
        ids: int64 [any], outputs that there are, each as often as it is wanted; contiguous.
        dtype: of the result.
    """
    rows = torch.empty(len(ids), section.layout.in_features, dtype=dtype, device=ids.device)
    if len(ids):
        _decode(rows, section, ids, 0, _LEAST_OUTPUTS)
    return rows


def _decode(
    weight: torch.Tensor, section: CodedSection, indices: torch.Tensor | None, first_output: int, block_outputs: int
) -> None:
    assert weight.is_contiguous()
    layout, num_decoded = section.layout, len(weight)
    decode_kernel[layout.num_blocks, triton.cdiv(num_decoded, block_outputs)](
        weight,
        section.codes,
        section.outer_scales,
        section.outer_minima,
        section.zero_points,
        section.inner_scales,
        section.inner_minima,
        section.output_scales,
        indices,
        first_output,
        num_decoded,
        section.out_features,
        layout.in_features,
        **coded_constants(layout, weight.dtype),
        BLOCK_OUTPUTS=block_outputs,
        num_warps=8 if indices is None else 4,
        maxnreg=255,  # else ptxas may spill registers, so as to run more programs at a time
        enable_fp_fusion=True,
    )


def scratch_of(shapes: Iterable[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for the decoded weights of layers that are computed one after the other.

    Args:
        shapes: the outputs and inputs of each layer.
        dtype: of decoded weights.
        device: of the memory.

    Returns:
        Elements that suffice for the largest layer, or for a part of its outputs.
    """
    most = _SCRATCH_BYTES // dtype.itemsize
    sizes = (max(min(outputs * inputs, most), min(outputs, OUTPUTS_MULTIPLE) * inputs) for outputs, inputs in shapes)
    return torch.empty(max(sizes, default=0), dtype=dtype, device=device)
