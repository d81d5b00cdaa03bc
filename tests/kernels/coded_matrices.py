"""Coded matrices with random codes and factors, of formats that checkpoints have, and errors to plant in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kernels.coded_weight import CodedMatrix, CodedWeight, CodeFormat, Section
from kernels.cpu.coded_linear import CodedLinear

__all__ = ["FORMATS", "LEVELS", "PLANTED", "packed_words", "random_matrix"]

LEVELS = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)

FORMATS = {
    "Q4_0": CodeFormat(bits=4, zero=8.0),
    "Q4_K": CodeFormat(bits=4, granules_per_outer=8, has_inner=True, zero_kind="minima"),
    "Q5_1": CodeFormat(bits=5, zero_kind="minima"),
    "Q6_K": CodeFormat(bits=6, granule=16, granules_per_outer=16, has_inner=True, zero=32.0),
    "Q8_0": CodeFormat(bits=8, zero=128.0),
    "Q2_K": CodeFormat(bits=2, granule=16, granules_per_outer=16, has_inner=True, zero_kind="minima"),
    "Q3_K": CodeFormat(bits=3, granule=16, granules_per_outer=16, has_inner=True, zero=4.0),
    "IQ4_XS": CodeFormat(bits=4, granules_per_outer=8, has_inner=True, zero=128.0, levels=LEVELS),
    "NVFP4": CodeFormat(bits=4, granule=16, zero=12.0, levels=LEVELS, has_output_scales=True),
    "GPTQ": CodeFormat(bits=4, granules_per_outer=4, zero_kind="points"),
    "7 bits by output": CodeFormat(bits=7, granules_per_outer=2**19, outer_type="float32", zero_kind="points"),
    "FP8": CodeFormat(bits=8, granules_per_outer=4, outer_type="float32", floats="e4m3"),
    "FP8 by output": CodeFormat(bits=8, granules_per_outer=2**19, outer_type="bfloat16", floats="e4m3"),
    "E5M2": CodeFormat(bits=8, granules_per_outer=16, outer_type="float16", floats="e5m2"),
    "MXFP8": CodeFormat(bits=8, outer_type="bfloat16", floats="e4m3"),
    "desc_act": CodeFormat(bits=4, granules_per_outer=4, zero_kind="points", has_input_order=True),
    "groups of 512": CodeFormat(bits=8, granules_per_outer=16, outer_type="bfloat16", zero_kind="minima"),
}


def random_matrix(form: CodeFormat, rows: int, columns: int, seed: int = 0) -> CodedMatrix:
    generator = torch.Generator().manual_seed(seed)
    outers, granules = form.num_outers(columns), form.num_granules(columns)

    def octets(count: int, low: int, high: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.randint(low, high, (rows, count), generator=generator, dtype=dtype)

    def floats(count: int) -> torch.Tensor:
        return (torch.randn(rows, count, generator=generator) * 0.01).to(form.outer_dtype)

    codes = octets(columns, 0, 1 << form.bits)
    if form.floats is not None:
        codes[~codes.view(form.code_dtype).float().isfinite()] = 3
    parts = {"codes": codes, "outer_scales": floats(outers)}
    if form.zero_kind == "minima":
        parts["outer_minima"] = floats(outers)
    if form.zero_kind == "points":
        parts["zero_points"] = octets(outers, 0, 1 << form.bits)
    if form.has_inner:
        parts["inner_scales"] = octets(granules, -128, 128, torch.int8)
        if form.zero_kind == "minima":
            parts["inner_minima"] = octets(granules, 0, 256)
    if form.has_output_scales:
        parts["output_scales"] = torch.rand(rows, generator=generator)
    order = torch.randperm(columns, generator=generator, dtype=torch.int32) if form.has_input_order else None
    return CodedMatrix(format=form, input_order=order, **parts)


def packed_words(matrix: CodedMatrix, first_output: int = 0) -> torch.Tensor:
    """Return the words of a layer with the matrix as outputs from ``first_output`` on; the others are zero."""
    num_outputs = first_output + matrix.shape[0]
    layer = CodedLinear([Section(matrix.format, num_outputs)], matrix.shape[1], num_outputs)
    layer.set_weight(CodedWeight((matrix,)), first_output=first_output)
    return layer.words


def shifted(name: str, dim: int) -> Callable[[CodedMatrix], CodedMatrix]:
    return lambda matrix: matrix.with_parts(matrix.parts | {name: matrix.parts[name].roll(1, dim)})


PLANTED: dict[str, tuple[str, Callable[[CodedMatrix], CodedMatrix]]] = {
    "codes of the next output": ("Q4_0", shifted("codes", 0)),
    "codes of the next input": ("Q4_0", shifted("codes", 1)),
    "the next granule's scale": ("Q4_0", shifted("outer_scales", 1)),
    "the next granule's inner scale": ("Q6_K", shifted("inner_scales", 1)),
    "the next granule's minimum": ("Q4_K", shifted("inner_minima", 1)),
    "the next group's zero point": ("GPTQ", shifted("zero_points", 1)),
    "the next block's scale": ("FP8", shifted("outer_scales", 1)),
    "the inputs in order": ("desc_act", lambda m: replace(m, input_order=torch.arange(m.shape[1], dtype=torch.int32))),
    "the inverse order": ("desc_act", lambda m: replace(m, input_order=m.input_order.argsort().int())),
    "another sign": ("FP8", lambda m: m.with_parts(m.parts | {"codes": m.codes ^ 128})),
    "another constant": ("Q8_0", lambda m: replace(m, format=replace(m.format, zero=127.0))),
    "another level": ("IQ4_XS", lambda m: replace(m, format=replace(m.format, levels=(*LEVELS[:-1], 240)))),
    "the next output's factor": ("NVFP4", shifted("output_scales", 0)),
    "the last code": ("Q4_0", lambda m: m.with_parts(m.parts | {"codes": torch.cat((m.codes[:, :-1],
                                                                                  m.codes[:, -1:] ^ 15), dim=1)})),
}  # fmt: skip
