"""FP4: two codes a byte, with scales for groups of 16 inputs (NVFP4) or exponents for groups of 32 (MXFP4).

NVFP4   X.weight U8 [out, in / 2], X.weight_scale F8_E4M3 [out, in / 16], and one of
            X.weight_scale_2       (ModelOpt) a scalar that multiplies the scales
            X.weight_global_scale  (compressed-tensors, with X.weight_packed for X.weight) one that divides them
MXFP4   X.weight or X.weight_packed U8 [out, in / 2], X.weight_scale U8 [out, in / 32]
GPT-OSS experts.gate_up_proj_blocks U8 [experts, out, in / 32, 16], experts.gate_up_proj_scales U8 [experts, out,
        in / 32]: the model has these transposed, [experts, in, out]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from engine.models.checkpoint.formats.module_tensors import ModuleTensors
from engine.models.checkpoint.packed_weight import PackedWeight
from engine.models.checkpoint.transposed_weight import transposed_packed
from kernels.coded_weight import CodedMatrix, CodeFormat
from kernels.dequant.coded_groups import coded_groups, format_of_groups
from kernels.dequant.fp4 import E2M1, dequantise_fp4, write_fp4_transposed
from kernels.dequant.fp8 import e4m3_numbers
from kernels.dequant.integers import unpack_bits
from kernels.dequant.scales import e8m0_numbers

__all__ = ["Mxfp4Weight", "Nvfp4Weight", "fp4_weights"]

_NV_GROUP, _MX_GROUP = 16, 32
_BY_ROWS = frozenset({"weight", "scale"})
_EXPONENTS = ("U8", "F8_E8M0")
_ZERO = 12.0
_LEVELS = tuple(int(2 * number + _ZERO) for number in E2M1)
_LARGE_EXPONENT = 250  # of E8M0: 6 * 2 ** (250 - 127) is finite in bfloat16


@dataclass(frozen=True, kw_only=True, eq=False)
class Nvfp4Weight(PackedWeight):
    """Parts ``weight``, ``scale`` and maybe ``global scale``, which divides if ``divides``."""

    format = "NVFP4"
    divides: bool

    @property
    def code_format(self) -> CodeFormat | None:
        """How its codes are kept as they are."""
        return format_of_groups(
            4, _NV_GROUP, self.shape[-1], torch.float16, zero=_ZERO, levels=_LEVELS, has_output_scales=True
        )

    def coded(self, parts: Mapping[str, torch.Tensor], rows: range) -> CodedMatrix:
        """Return rows of the matrix as codes; levels are twice the codes' numbers."""
        form, factor = self.code_format, parts.get("global scale", torch.ones(1)).float().view(1)
        assert form is not None
        scales = e4m3_numbers()[parts["scale"].view(torch.uint8).int()] / 2
        output_scales = (1 / factor if self.divides else factor).repeat(len(rows))
        return coded_groups(form, unpack_bits(parts["weight"], 4, self.shape[-1]), scales, output_scales=output_scales)

    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows of the matrix in float32."""
        scales = e4m3_numbers()
        if (factor := parts.get("global scale")) is not None:
            factor = factor.float().view(1)
            scales = scales / factor if self.divides else scales * factor
        return dequantise_fp4(parts["weight"], parts["scale"], _NV_GROUP, scale_table=scales, out=out)


@dataclass(frozen=True, kw_only=True, eq=False)
class Mxfp4Weight(PackedWeight):
    """Parts ``weight`` and ``scale``."""

    format = "MXFP4"

    @property
    def code_format(self) -> CodeFormat | None:
        """How its codes are kept as they are."""
        return format_of_groups(4, _MX_GROUP, self.shape[-1], torch.bfloat16, zero=_ZERO, levels=_LEVELS)

    def coded(self, parts: Mapping[str, torch.Tensor], rows: range) -> CodedMatrix:
        """Return rows of the matrix as codes; levels are twice the codes' numbers."""
        form, octets = self.code_format, parts["weight"].flatten(1)
        assert form is not None
        scales = e8m0_numbers()[parts["scale"].view(torch.uint8).int()] / 2
        return coded_groups(form, unpack_bits(octets, 4, self.shape[-1]), scales)

    def are_bounded(self, parts: Mapping[str, torch.Tensor]) -> bool:
        """Whether the parts show that all numbers are finite."""
        return bool(parts["scale"].view(torch.uint8).max() <= _LARGE_EXPONENT)

    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows of the matrix in float32."""
        octets = parts["weight"].flatten(1)  # of GPT-OSS [outputs, groups, 16]
        return dequantise_fp4(octets, parts["scale"], _MX_GROUP, scale_table=e8m0_numbers(), out=out)

    def write_transposed(self, parts: Mapping[str, torch.Tensor], out: torch.Tensor) -> bool:
        """Write a whole matrix to ``out``, [columns, rows], in one pass, if C can do that."""
        return write_fp4_transposed(out, parts["weight"].flatten(1), parts["scale"], e8m0_numbers())


def fp4_weights(module: ModuleTensors) -> Iterator[PackedWeight]:
    """Yield the FP4 weights of a module.

    Raises:
        ModelLoadError: if scales do not fit a weight.
    """
    for name in [name for name in module.tensors if name.endswith("_blocks")]:
        if module.find(name.replace("_blocks", "_scales")) is not None and module.tensors[name].dtype == "U8":
            yield _transposed(module, name)
    weight = module.find("weight_packed", "weight")
    if weight is None or module.tensors[weight].dtype != "U8" or module.find("weight_scale") is None:
        return
    if module.tensors["weight_scale"].dtype in _EXPONENTS:
        yield _weight(module, weight, None)
    elif module.tensors["weight_scale"].dtype == "F8_E4M3":
        factor = module.find("weight_scale_2", "weight_global_scale")
        if factor is None:
            raise module.error(weight, "has FP8 scales, but neither weight_scale_2 nor weight_global_scale beside it")
        yield _weight(module, weight, factor)


def _weight(module: ModuleTensors, name: str, factor: str | None) -> PackedWeight:
    codes, scale = module.tensors[name], module.tensors["weight_scale"]
    group = _MX_GROUP if factor is None else _NV_GROUP
    if len(codes.shape) != 2 or scale.shape != (codes.shape[0], -(-2 * codes.shape[1] // group)):
        raise module.error(
            "weight_scale",
            f"is {list(scale.shape)}, which does not fit codes of {list(codes.shape)} bytes with a "
            f"scale for each {group}",
        )
    shape, full_name = (codes.shape[0], 2 * codes.shape[1]), module.full_name("weight")
    if factor is None:
        parts = module.take(weight=name, scale="weight_scale")
        return Mxfp4Weight(name=full_name, parts=parts, shape=shape, read_by_rows=_BY_ROWS)
    whole = module.tensors[factor]
    if whole.dtype not in ("F32", "BF16", "F16") or whole.shape not in ((), (1,)):
        raise module.error(factor, f"is {whole.dtype} {list(whole.shape)}, and not one number")
    parts = module.take(**{"weight": name, "scale": "weight_scale", "global scale": factor})
    divides = factor == "weight_global_scale"
    return Nvfp4Weight(name=full_name, parts=parts, shape=shape, read_by_rows=_BY_ROWS, divides=divides)


def _transposed(module: ModuleTensors, name: str) -> PackedWeight:
    weight, scales_name = name.removesuffix("_blocks"), name.replace("_blocks", "_scales")
    blocks, scales = module.tensors[name], module.tensors[scales_name]
    if len(blocks.shape) < 3 or blocks.shape[-1] != _MX_GROUP // 2:
        raise module.error(name, f"is {list(blocks.shape)}, and not blocks of {_MX_GROUP // 2} bytes")
    if scales.shape != blocks.shape[:-1] or scales.dtype not in _EXPONENTS:
        raise module.error(scales_name, f"is {scales.dtype} {list(scales.shape)}, and the blocks {list(blocks.shape)}")
    *stacked, outputs, groups, _ = blocks.shape
    stored = Mxfp4Weight(
        name=module.full_name(weight),
        parts=module.take(weight=name, scale=scales_name),
        shape=(*stacked, outputs, groups * _MX_GROUP),
        read_by_rows=_BY_ROWS,
    )
    return transposed_packed(stored)
