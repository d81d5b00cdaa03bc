"""ModelOpt's 4-bit integers (INT4_AWQ, which configs call W4A16_AWQ, and W4A8_AWQ): two outputs a byte.

X.weight          U8 [out / 2, in]: the even output in the low half, each in two's complement
X.weight_scale    [out, in / group]
X.weight_scale_2  of W4A8_AWQ, one number: the scale of the FP8 numbers that its kernels round weights to. The value is
                  code * weight_scale, which is not rounded here, as activations are not

Layers that no norm precedes also have X.pre_quant_scale: see scaled_inputs.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from engine.models.checkpoint.formats.groups import group_size_of, sizes_in, why_not_coded
from engine.models.checkpoint.formats.module_tensors import ModuleTensors
from engine.models.checkpoint.packed_weight import PART_DTYPES, PackedWeight
from kernels.coded_weight import CodedMatrix, CodeFormat
from kernels.dequant.coded_groups import coded_groups, format_of_groups
from kernels.dequant.integers import dequantise_groups

__all__ = ["ModelOptInt4Weight", "modelopt_int4_weights"]

_SCALES = ("F32", "BF16", "F16")
_SIGN = 8
_SECOND = "weight_scale_2"


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelOptInt4Weight(PackedWeight):
    """Parts ``weight`` and ``scale``; ``group_size``: inputs with one scale."""

    format = "ModelOpt int4"
    group_size: int

    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows of the matrix in float32."""
        return dequantise_groups(_codes(parts, rows), parts["scale"], _SIGN, self.group_size, out=out)

    @property
    def code_format(self) -> CodeFormat | None:
        """How its codes are kept as they are."""
        dtype = PART_DTYPES[self.parts["scale"].dtype]
        return format_of_groups(4, self.group_size, self.shape[-1], dtype, zero=float(_SIGN))

    @property
    def why_not_coded(self) -> str:
        """Why it has no ``code_format``."""
        return why_not_coded(self.group_size)

    def coded(self, parts: Mapping[str, torch.Tensor], rows: range) -> CodedMatrix:
        """Return rows of the matrix as codes."""
        form = self.code_format
        assert form is not None
        return coded_groups(form, _codes(parts, rows), parts["scale"])


def _codes(parts: Mapping[str, torch.Tensor], rows: range) -> torch.Tensor:
    """Return integers from 0 to 15, [num_rows, columns]."""
    octets = parts["weight"][rows.start // 2 : rows.stop // 2]
    return torch.stack([octets & 15, octets >> 4], dim=1).flatten(0, 1) ^ _SIGN


def modelopt_int4_weights(module: ModuleTensors) -> Iterator[PackedWeight]:
    """Yield the weight of a module if it has one of these.

    Raises:
        ModelLoadError: if the scales do not fit the weight.
    """
    weight, scale = module.tensors.get("weight"), module.tensors.get("weight_scale")
    if weight is None or scale is None or weight.dtype != "U8" or len(weight.shape) != 2 or scale.dtype not in _SCALES:
        return
    rows, columns = 2 * weight.shape[0], weight.shape[1]
    num_groups = scale.shape[1] if len(scale.shape) == 2 and scale.shape[0] == rows else 0
    group_size = group_size_of(columns, num_groups, sizes_in(module.quantization.fields))
    if group_size is None:
        raise module.error("weight_scale", f"is {list(scale.shape)}, which is not that of scales of {[rows, columns]}")
    if (second := module.find(_SECOND)) is not None:
        own = module.tensors[second]
        if own.dtype not in _SCALES or own.shape not in ((), (1,)):
            raise module.error(second, f"is {own.dtype} {list(own.shape)}, and W4A8_AWQ has one number")
        module.take(second=second)
    yield ModelOptInt4Weight(
        name=module.full_name("weight"),
        parts=module.take(weight="weight", scale="weight_scale"),
        shape=(rows, columns),
        read_by_rows=frozenset({"scale"}),
        row_multiple=2,
        group_size=group_size,
    )
