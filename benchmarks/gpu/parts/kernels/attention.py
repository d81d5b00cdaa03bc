"""Attention kernels against the float64 reference: at the shapes that are served, and at odd ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.backends import block_size_for, cache_kinds, has_dtype, usable_backends
from benchmarks.gpu.inputs.attention_cases import ODD_BATCHES, ODD_DTYPES, ODD_SHAPES, Case, serving_cases
from benchmarks.gpu.inputs.paged_batch import HeadShape, chunked_reference, make_inputs, worst_error
from benchmarks.gpu.run.part_run import PartRun
from kernels.attention.base import AttentionBackend, AttentionInputs
from kernels.attention.registry import BACKENDS

__all__ = ["odd_shapes", "serving_shapes"]


@dataclass(frozen=True)
class _Comparison:
    shape: HeadShape
    case: Case
    option: str | None = None  # of registry.py


def serving_shapes(part: PartRun) -> None:
    """Compare bfloat16 outputs for decodes, mixed steps and prefills with contexts of up to 32k tokens."""
    for backend in usable_backends(part):
        _compare(part, backend, list(_serving(part, backend)))


def _serving(part: PartRun, backend: AttentionBackend) -> Iterator[_Comparison]:
    for num_heads, num_kv_heads, head_dim in part.sizes.attention:
        for is_fp8 in cache_kinds(backend):
            shape = HeadShape(num_heads, num_kv_heads, head_dim, backend.default_block_size, is_fp8=is_fp8)
            yield from (_Comparison(shape, case) for case in serving_cases(part.sizes.context))


def odd_shapes(part: PartRun) -> None:
    """Compare small batches over head widths, group sizes, block sizes and dtypes; float16 with one shape only.

    With this shape also soft-caps and sinks, where the backend computes them; with it, and with bfloat16, also caches
    in FP8.
    """
    for backend in usable_backends(part):
        _compare(part, backend, list(_odd(backend)))


def _odd(backend: AttentionBackend) -> Iterator[_Comparison]:
    options = [item for item in ("softcap", "sinks") if item in BACKENDS[backend.name].options]
    for dtype in ODD_DTYPES:
        shapes = list(ODD_SHAPES.values()) if dtype != torch.float16 else [ODD_SHAPES["pairs"]]
        for shape in shapes if has_dtype(backend, dtype) else []:
            fitting = replace(shape, dtype=dtype, block_size=block_size_for(backend, shape.block_size))
            is_usual = shape == ODD_SHAPES["pairs"]
            for is_fp8 in cache_kinds(backend) if is_usual or dtype == torch.bfloat16 else (False,):
                for option in (None, *(options if is_usual else ())):
                    case_shape = replace(fitting, is_fp8=is_fp8)
                    yield from (_Comparison(case_shape, case, option) for case in ODD_BATCHES)


def _with_option(inputs: AttentionInputs, option: str | None) -> AttentionInputs:
    match option:
        case "softcap":
            return replace(inputs, softcap=1.3)
        case "sinks":
            return replace(inputs, sinks=torch.linspace(-1.0, 3.0, inputs.num_heads, device=inputs.query.device))
    return inputs


def _compare(part: PartRun, backend: AttentionBackend, comparisons: list[_Comparison]) -> None:
    """Record the worst error, as a share of the tolerance, after each case; a larger one than 1 is a fault."""
    worst, compared = 0.0, 0
    for index, comparison in enumerate(comparisons):
        shape, case, option = comparison.shape, comparison.case, comparison.option
        for window in case.windows:
            inputs = make_inputs(case.lengths, shape, part.device, window=window, seed=index)
            inputs = _with_option(inputs, option)
            error = worst_error(backend.forward(inputs), chunked_reference(inputs))
            if not error <= 1.0:
                part.fault(f"{backend.name}, {shape}, {case.name}, window {window}, {option}: {error:.3g} x tolerance")
            worst, compared = max(worst, min(error, 1e9)), compared + 1
            part.record(backend.name, {"compared": compared, "worst_share_of_tolerance": worst})
