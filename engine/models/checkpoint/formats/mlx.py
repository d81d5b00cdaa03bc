"""MLX: integers with a scale and a bias for groups of inputs, or FP4 and FP8; of linear layers and embeddings alike.

    X.weight  U32 [out, in * bits / 32], packed one after another, the low bits first
    X.scales  [out, in / group]; of the modes mxfp4, nvfp4 and mxfp8 U8: exponents, or for nvfp4 E4M3
    X.biases  [out, in / group]: the value is code * scale + bias; absent in these modes

Experts are stacked, with their number as the first dimension: mlx_layout.py divides them. The shapes give only bits *
group, so config.json names both, with exceptions by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import shown
from engine.models.checkpoint.formats.fp4 import Mxfp4Weight, Nvfp4Weight
from engine.models.checkpoint.formats.fp8 import Fp8Weight
from engine.models.checkpoint.formats.groups import why_not_coded
from engine.models.checkpoint.formats.module_tensors import ModuleTensors
from engine.models.checkpoint.packed_weight import PART_DTYPES, PackedWeight
from kernels.coded_weight import CodedMatrix, CodeFormat
from kernels.dequant.coded_groups import coded_groups, format_of_groups
from kernels.dequant.integers import dequantise_affine_packed, unpack_bits
from kernels.dequant.stored import BYTES, NIBBLES

__all__ = ["MlxWeight", "mlx_weights"]

_FLOATS = ("F32", "BF16", "F16")
_BITS = (2, 3, 4, 5, 6, 8)
_LAYOUTS = {4: NIBBLES, 8: BYTES}  # of the others codes may begin in one byte and end in the next
# By mode: codes of a word, inputs with one scale, and the dtypes of codes and scales.
_FLOAT_MODES = {
    "mxfp4": (8, 32, "U8", "U8"),
    "nvfp4": (8, 16, "U8", "F8_E4M3"),
    "mxfp8": (4, 32, "F8_E4M3", "U8"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class MlxWeight(PackedWeight):
    """Parts ``weight``, ``scales`` and ``biases``."""

    format = "MLX"
    bits: int
    group_size: int

    @property
    def code_format(self) -> CodeFormat | None:
        """How its codes are kept as they are; None if biases and scales are of different types."""
        scales, biases = (PART_DTYPES[self.parts[name].dtype] for name in ("scales", "biases"))
        if scales != biases:
            return None
        return format_of_groups(self.bits, self.group_size, self.shape[-1], scales, zero_kind="minima")

    @property
    def why_not_coded(self) -> str:
        """Why it has no ``code_format``."""
        if self.parts["scales"].dtype != self.parts["biases"].dtype:
            return "their scales and biases are of different types"
        return why_not_coded(self.group_size)

    def coded(self, parts: Mapping[str, torch.Tensor], rows: range) -> CodedMatrix:
        """Return rows of the matrix as codes."""
        form, words, columns, layout = self.code_format, parts["weight"], self.shape[-1], _LAYOUTS.get(self.bits)
        assert form is not None
        codes = unpack_bits(words, self.bits, columns) if layout is None else words.view(torch.uint8)
        minima = -parts["biases"]
        return coded_groups(form, codes, parts["scales"], minima=minima, layout=layout, num_inputs=columns)

    @property
    def keeps_stored_codes(self) -> bool:
        """Whether the codes are the stored bytes."""
        return self.bits in _LAYOUTS

    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows of the matrix in float32."""
        words, scales, biases = parts["weight"], parts["scales"], parts["biases"]
        return dequantise_affine_packed(words, self.bits, self.shape[-1], scales, biases, self.group_size, out=out)


def mlx_weights(module: ModuleTensors) -> Iterator[PackedWeight]:
    """Yield the weight of a module; experts, or heads, may be stacked.

    Raises:
        ModelLoadError: if its tensors do not fit each other, or the config.
    """
    weight = module.tensors.get("weight")
    if weight is None or weight.dtype != "U32" or module.find("scales") is None:
        return
    if module.find("biases") is None:
        yield from _floats(module)
    else:
        yield from _integers(module)


def _integers(module: ModuleTensors) -> Iterator[PackedWeight]:
    weight, scales = module.tensors["weight"], module.tensors["scales"]
    for name in ("scales", "biases"):
        tensor = module.tensors[name]
        if tensor.dtype not in _FLOATS or tensor.shape != scales.shape or 0 in tensor.shape:
            raise module.error(name, f"is {tensor.dtype} {list(tensor.shape)}, which scales and biases are not")
    if len(weight.shape) not in (2, 3) or weight.shape[:-1] != scales.shape[:-1]:
        raise module.error("weight", f"is {list(weight.shape)}, but its scales are {list(scales.shape)}")
    bits, group_size = _sizes(module, weight.shape[-1], scales.shape[-1])
    shape = (*weight.shape[:-1], scales.shape[-1] * group_size)
    yield MlxWeight(
        name=module.full_name("weight"),
        parts=module.take(weight="weight", scales="scales", biases="biases"),
        shape=shape,
        read_by_rows=frozenset({"weight", "scales", "biases"}),
        bits=bits,
        group_size=group_size,
    )


def _floats(module: ModuleTensors) -> Iterator[PackedWeight]:
    """Yield weights of a mode without biases, which are those of other formats in words."""
    mode = _exception(module).get("mode", module.quantization.fields.get("mode"))
    if not isinstance(mode, str) or mode not in _FLOAT_MODES:
        raise module.error("weight", f"has no biases beside it, and the config's mode {shown(mode)} needs them")
    codes_in_word, group, codes, scale = _FLOAT_MODES[mode]
    weight, scales = module.tensors["weight"], module.tensors["scales"]
    *stacked, words = weight.shape
    columns = words * codes_in_word
    if scales.dtype != "U8" or len(stacked) not in (1, 2) or scales.shape != (*stacked, -(-columns // group)):
        raise module.error(
            "scales", f"is {scales.dtype} {list(scales.shape)}, which does not fit {mode} words of {list(weight.shape)}"
        )
    parts = {
        "weight": weight._replace(dtype=codes, shape=(*stacked, 4 * words)),
        "scale": scales._replace(dtype=scale),
    }
    module.take(weight="weight", scales="scales")
    name, shape, by_rows = module.full_name("weight"), (*stacked, columns), frozenset({"weight", "scale"})
    if mode == "mxfp8":
        by_rows = frozenset({"weight"})
        yield Fp8Weight(name=name, parts=parts, shape=shape, read_by_rows=by_rows, block=(1, group))
    elif mode == "mxfp4":
        yield Mxfp4Weight(name=name, parts=parts, shape=shape, read_by_rows=by_rows)
    else:
        yield Nvfp4Weight(name=name, parts=parts, shape=shape, read_by_rows=by_rows, divides=False)


def _sizes(module: ModuleTensors, words: int, num_groups: int) -> tuple[int, int]:
    """Return the bits of a code and the inputs with one scale, which the config has for the module or for all."""
    for fields in (_exception(module), module.quantization.fields):
        bits, group_size = fields.get("bits"), fields.get("group_size")
        if type(bits) is type(group_size) is int and bits in _BITS and bits * group_size * num_groups == words * 32:
            return bits, group_size
    sizes = {key: module.quantization.fields.get(key) for key in ("bits", "group_size")}
    raise module.error(
        "weight", f"has {words} words and {num_groups} scales for each output, which the config's {sizes} do not give"
    )


def _exception(module: ModuleTensors) -> Mapping[str, Any]:
    """Return what the config has for the module alone, whose name may begin with that of a multimodal model's part."""
    for name, fields in module.quantization.fields.items():
        if isinstance(fields, Mapping) and (name == module.name or name.endswith(f".{module.name}")):
            return fields
    stripped = module.name.removeprefix("model.")
    for name, fields in module.quantization.fields.items():
        if isinstance(fields, Mapping) and name.endswith(f".{stripped}"):
            return fields
    return {}
