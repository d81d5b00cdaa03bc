"""Codes with scales of groups of inputs as a CodedMatrix: FP8, GPTQ, AWQ, compressed-tensors, MLX, ModelOpt, FP4."""

from __future__ import annotations

import torch

from kernels.coded_weight import (
    BLOCK_INPUTS,
    SEGMENT_INPUTS,
    CodedMatrix,
    CodeFormat,
    Floats,
    OuterType,
    StoredLayout,
    Zero,
)

__all__ = ["coded_groups", "format_of_groups"]

_TYPES: dict[torch.dtype, OuterType] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}
_ALL_INPUTS = 2**24  # of a group that has them all


def format_of_groups(
    bits: int,
    group_size: int,
    columns: int,
    scales: torch.dtype,
    *,
    zero_kind: Zero = "constant",
    zero: float = 0.0,
    levels: tuple[int, ...] = (),
    floats: Floats | None = None,
    has_output_scales: bool = False,
) -> CodeFormat | None:
    """Return the format of codes with scales for groups of inputs; None if there is none.

    Args:
        bits: of a code.
        group_size: neighbouring inputs with one scale.
        columns: inputs; a group may have more.
        scales: their dtype.
        zero_kind: as `CodeFormat` has it.
        zero: likewise.
        levels: likewise.
        floats: likewise.
        has_output_scales: likewise.
    """
    if group_size >= columns:
        group_size = _ALL_INPUTS
    is_power = group_size & group_size - 1 == 0
    if (
        not 2 <= bits <= 8
        or group_size < (16 if floats is None else BLOCK_INPUTS)
        or not (is_power or group_size % SEGMENT_INPUTS == 0)
    ):
        return None
    granule = min(group_size, BLOCK_INPUTS)
    return CodeFormat(
        bits=bits,
        granule=granule,
        granules_per_outer=group_size // granule,
        outer_type=_TYPES[scales],
        zero_kind=zero_kind,
        zero=zero,
        levels=levels,
        floats=floats,
        has_output_scales=has_output_scales,
    )


def coded_groups(
    form: CodeFormat,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    zeros: torch.Tensor | None = None,
    minima: torch.Tensor | None = None,
    output_scales: torch.Tensor | None = None,
    input_order: torch.Tensor | None = None,
    layout: StoredLayout | None = None,
    num_inputs: int = 0,
) -> CodedMatrix:
    """Return rows of a weight.

    Args:
        form: what ``format_of_groups`` returned.
        codes: integers from 0 on, or the bits of floats, [num_rows, columns].
        scales: [num_rows, num_groups], or one row for all.
        zeros: the zero points, [num_rows, num_groups]; of other formats None.
        minima: [num_rows, num_groups]; of other formats None.
        output_scales: float32 [num_rows]; of other formats None.
        input_order: int32 [columns], the inputs group by group; None: the inputs of a group are neighbours. Codes with
            an order have no layout.
        layout: of codes and scales, if they are kept as the file has them.
        num_inputs: columns, where there is a layout.
    """
    num_rows = len(codes)
    if input_order is not None:
        codes = codes.index_select(1, input_order)

    def spread(factors: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        return None if factors is None else factors.to(dtype).expand(num_rows, -1)

    has_bytes = layout is not None and layout.scales is not None
    spread_scales = spread(scales, torch.uint8 if has_bytes else form.outer_dtype)
    assert spread_scales is not None
    return CodedMatrix(
        format=form,
        codes=codes.to(torch.uint8),
        outer_scales=spread_scales,
        outer_minima=spread(minima, form.outer_dtype),
        zero_points=spread(zeros, torch.uint8),
        output_scales=output_scales,
        input_order=input_order,
        layout=layout,
        stored_inputs=num_inputs,
    )
