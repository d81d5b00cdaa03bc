"""FP4: two codes a byte, with scales for groups of 16 inputs (NVFP4) or exponents for groups of 32 (MXFP4).

NVFP4   X.weight U8 [out, in / 2], X.weight_scale F8_E4M3 [out, in / 16], and one of
            X.weight_scale_2       (ModelOpt) a scalar that multiplies the scales
            X.weight_global_scale  (compressed-tensors, with X.weight_packed for X.weight) one that divides them
MXFP4   X.weight or X.weight_packed U8 [out, in / 2], X.weight_scale U8 [out, in / 32]
stacked experts.gate_up_proj U8 [experts, out, in / 2], its _weight_scale and _weight_scale_2, of
        ModelOpt. The second scale is of all, of each, or of the gates and of the ups of each. fp4_by_inputs.py has the
        weights of models that multiply by [experts, in, out]
GPT-OSS experts.gate_up_proj_blocks U8 [experts, out, in / 32, 16], experts.gate_up_proj_scales U8 [experts, out,
        in / 32]: the model has these transposed, [experts, in, out]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from engine.models.checkpoint.formats.fp4_by_inputs import Fp4ByInputsWeight
from engine.models.checkpoint.formats.module_tensors import ModuleTensors
from engine.models.checkpoint.packed_weight import PackedWeight
from engine.models.checkpoint.transposed_weight import transposed_packed
from kernels.coded_weight import CodedMatrix, CodeFormat, StoredLayout, StoredScales
from kernels.dequant.coded_groups import coded_groups, format_of_groups
from kernels.dequant.fp4 import E2M1, dequantise_fp4, write_fp4_transposed
from kernels.dequant.fp8 import e4m3_numbers
from kernels.dequant.scales import e8m0_numbers

__all__ = ["Mxfp4Weight", "Nvfp4Weight", "fp4_weights"]

_NV_GROUP, _MX_GROUP = 16, 32
_BY_ROWS = frozenset({"weight", "scale"})
_EXPONENTS = ("U8", "F8_E8M0")
_FACTORS = ("F32", "BF16", "F16")
_ZERO = 12.0
_LEVELS = tuple(int(2 * number + _ZERO) for number in E2M1)
_LARGE_EXPONENT = 250  # of E8M0: 6 * 2 ** (250 - 127) is finite in bfloat16


@dataclass(frozen=True, kw_only=True, eq=False)
class Nvfp4Weight(PackedWeight):
    """Parts ``weight``, ``scale`` and maybe ``global scale``, which divides if ``divides``.

    A matrix has one global scale, or one for each half of its rows.
    """

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
        form, factors = self.code_format, parts.get("global scale", torch.ones(1)).float().flatten()
        assert form is not None
        whole = (1 / factors if self.divides else factors).repeat_interleave(self.shape[-2] // len(factors))
        output_scales = whole[rows.start : rows.stop]
        return _coded(form, parts, self.shape[-1], "e4m3 halves", output_scales)

    @property
    def keeps_stored_codes(self) -> bool:
        """Whether the codes are the stored bytes."""
        return True

    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows of the matrix in float32."""
        factors = parts.get("global scale", torch.ones(1)).float().flatten()
        tables = [e4m3_numbers() / factor if self.divides else e4m3_numbers() * factor for factor in factors]
        codes, scales, half = parts["weight"], parts["scale"], self.shape[-2] // 2
        if len(tables) == 1 or rows.stop <= half or rows.start >= half:
            table = tables[0] if rows.stop <= half else tables[-1]
            return dequantise_fp4(codes, scales, _NV_GROUP, scale_table=table, out=out)
        first = half - rows.start
        gates = dequantise_fp4(codes[:first], scales[:first], _NV_GROUP, scale_table=tables[0])
        return torch.cat([gates, dequantise_fp4(codes[first:], scales[first:], _NV_GROUP, scale_table=tables[1])])


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
        form = self.code_format
        assert form is not None
        return _coded(form, parts, self.shape[-1], "e8m0 halves", None)

    @property
    def keeps_stored_codes(self) -> bool:
        """Whether the codes are the stored bytes."""
        return True

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


def _coded(
    form: CodeFormat,
    parts: Mapping[str, torch.Tensor],
    columns: int,
    scales: StoredScales,
    output_scales: torch.Tensor | None,
) -> CodedMatrix:
    """Return rows as they are stored; the levels of a format are twice the codes' numbers."""
    octets, own = parts["weight"].flatten(1), parts["scale"].view(torch.uint8)
    layout = StoredLayout("nibbles", scales)
    return coded_groups(form, octets, own, output_scales=output_scales, layout=layout, num_inputs=columns)


def fp4_weights(module: ModuleTensors) -> Iterator[PackedWeight]:
    """Yield the FP4 weights of a module.

    Raises:
        ModelLoadError: if scales do not fit a weight.
    """
    for name in [name for name in module.tensors if name.endswith("_blocks")]:
        if module.find(name.replace("_blocks", "_scales")) is not None and module.tensors[name].dtype == "U8":
            yield _transposed(module, name)
    for name in [name for name, tensor in module.tensors.items() if tensor.dtype == "U8"]:
        prefix = "" if name in ("weight", "weight_packed") else f"{name}_"
        scale = module.tensors.get(f"{prefix}weight_scale")
        if scale is not None and scale.dtype in _EXPONENTS:
            yield _weight(module, name, f"{prefix}weight_scale", None)
        elif scale is not None and scale.dtype == "F8_E4M3":
            names = f"{prefix}weight_scale_2", f"{prefix}weight_global_scale"
            if (factor := module.find(*names)) is None:
                raise module.error(name, f"has FP8 scales, but neither {' nor '.join(names)} beside it")
            yield _weight(module, name, f"{prefix}weight_scale", factor)


def _weight(module: ModuleTensors, name: str, scale_name: str, factor: str | None) -> PackedWeight:
    codes, scale = module.tensors[name].shape, module.tensors[scale_name].shape
    group = _MX_GROUP if factor is None else _NV_GROUP
    has_inputs_first = len(codes) == 3 and scale == (codes[0], -(-2 * codes[1] // group), codes[2])
    if not has_inputs_first and (len(codes) not in (2, 3) or scale != (*codes[:-1], -(-2 * codes[-1] // group))):
        raise module.error(
            scale_name,
            f"is {list(scale)}, which does not fit codes of {list(codes)} bytes with a scale for each {group}",
        )
    shared = frozenset() if factor is None else _shared(module, factor, codes, may_differ=not has_inputs_first)
    divides = factor is not None and factor.endswith("weight_global_scale")
    full_name = module.full_name("weight" if name == "weight_packed" else name)
    taken = module.take(**{"weight": name, "scale": scale_name, "global scale": factor})
    shape = (*codes[:-1], 2 * codes[-1])
    if has_inputs_first:
        shape = (codes[0], 2 * codes[1], codes[2])
        return Fp4ByInputsWeight(
            name=full_name, parts=taken, shape=shape, shared=shared, row_multiple=group, divides=divides
        )
    if factor is None:
        return Mxfp4Weight(name=full_name, parts=taken, shape=shape, read_by_rows=_BY_ROWS)
    return Nvfp4Weight(name=full_name, parts=taken, shape=shape, shared=shared, read_by_rows=_BY_ROWS, divides=divides)


def _shared(module: ModuleTensors, name: str, codes: tuple[int, ...], *, may_differ: bool) -> frozenset[str]:
    """Return the global scale as a set of parts if all stacked matrices share it; else nothing: each has its own.

    Args:
        module: of the weight.
        name: of the scale.
        codes: their shape.
        may_differ: whether the halves of a matrix's rows, gates and ups, may have one each.
    """
    factor, stacked = module.tensors[name], codes[:-2]
    is_shared = factor.shape in ((), (1,)) and stacked != (1,)
    counts = (1, 2) if may_differ and codes[-2] % 2 == 0 else (1,)
    has_each = bool(stacked) and math.prod(factor.shape) in [count * stacked[0] for count in counts]
    if factor.dtype not in _FACTORS or not (is_shared or (has_each and factor.shape[:1] == stacked)):
        raise module.error(name, f"is {factor.dtype} {list(factor.shape)}, and not one number for each matrix")
    return frozenset({"global scale"}) if is_shared else frozenset()


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
