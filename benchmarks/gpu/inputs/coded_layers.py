"""Linear layers on random codes of a few bits, in formats that checkpoints have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.coded_weight import CodedMatrix, CodedWeight, CodeFormat
from kernels.dequant.fp4 import FP4_LEVELS
from kernels.dequant.gguf_k import Q4_K, Q6_K

if TYPE_CHECKING:
    from kernels.linear.coded_triton import CodedTritonLinear

__all__ = ["FORMATS", "coded_linear", "random_matrix", "rotated"]

ROTATED_BYTES = 2**28  # several times the 60 MB of an H200's second-level cache
FORMATS = {
    "int4, groups of 128": CodeFormat(bits=4, granules_per_outer=4, outer_type="bfloat16", zero=8.0),
    "GPTQ, groups of 128": CodeFormat(bits=4, granules_per_outer=4, zero_kind="points"),
    "Q4_K": Q4_K,
    "Q6_K": Q6_K,
    "MXFP4": CodeFormat(bits=4, outer_type="bfloat16", zero=12.0, levels=FP4_LEVELS),
    "NVFP4": CodeFormat(bits=4, granule=16, outer_type="float32", zero=12.0, levels=FP4_LEVELS, has_output_scales=True),
    "FP8, blocks of 128": CodeFormat(bits=8, granules_per_outer=4, outer_type="float32", floats="e4m3"),
    "int8 by output": CodeFormat(bits=8, granules_per_outer=2**18, outer_type="float32", zero=128.0),
}


def random_matrix(form: CodeFormat, num_outputs: int, num_inputs: int, device: torch.device) -> CodedMatrix:
    """Return codes that are all possible ones but NaN, with scales that make weights of about 0.01."""
    generator = torch.Generator(device).manual_seed(num_outputs + num_inputs)

    def octets(count: int, low: int, high: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.randint(low, high, (num_outputs, count), generator=generator, device=device, dtype=dtype)

    def floats(count: int) -> torch.Tensor:
        scale = 0.01 / (1 << form.bits) if form.floats is None else 1e-4
        numbers = torch.rand(num_outputs, count, generator=generator, device=device)
        return (scale * (0.5 + numbers)).to(form.outer_dtype)

    codes = octets(num_inputs, 0, 1 << form.bits)
    if form.floats is not None:
        codes[~codes.view(form.code_dtype).float().isfinite()] = 3
    outers, granules = form.num_outers(num_inputs), form.num_granules(num_inputs)
    has_minima = form.zero_kind == "minima"
    return CodedMatrix(
        format=form,
        codes=codes,
        outer_scales=floats(outers),
        outer_minima=floats(outers) if has_minima else None,
        zero_points=octets(outers, 0, 1 << form.bits) if form.zero_kind == "points" else None,
        inner_scales=octets(granules, 1, 64, torch.int8) if form.has_inner else None,
        inner_minima=octets(granules, 0, 64) if form.has_inner and has_minima else None,
        output_scales=floats(1).squeeze(1).float() if form.has_output_scales else None,
    )


def coded_linear(matrix: CodedMatrix, device: torch.device, *, batch_invariant: bool = False) -> CodedTritonLinear:
    """Return a layer of the Triton kernel, which decodes the weights of many rows into memory."""
    from kernels.linear.coded_decode import scratch_of  # this starts where there is no Triton, too
    from kernels.linear.coded_triton import CodedTritonLinear

    layer = CodedTritonLinear(CodedWeight((matrix,)), matrix.shape[0], device, batch_invariant=batch_invariant)
    layer.scratch = scratch_of([(layer.out_features, layer.in_features)], torch.bfloat16, device)
    return layer


def rotated(matrix: CodedMatrix, device: torch.device) -> list[CodedTritonLinear]:
    """Return layers with the same weights in memory of their own, more than a cache holds."""
    first = coded_linear(matrix, device)
    num_bytes = sum(parameter.nbytes for parameter in first.parameters())
    layers = [first, *(coded_linear(matrix, device) for _ in range(max(1, ROTATED_BYTES // num_bytes)))]
    for layer in layers:
        layer.scratch = first.scratch  # as the layers of a model
    return layers
