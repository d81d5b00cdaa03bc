"""Integers of compressed-tensors: groups of 4 or 8 bits packed in words, or bytes.

X.weight_packed      I32 [out, ceil(in * bits / 32)]: code + 2**(bits - 1), the low bits first
X.weight_shape       I64 [2]: out and in
X.weight_scale       [out, ceil(in / group)], [out, 1] or [1]
X.weight_zero_point  I32 [ceil(out * bits / 32), ceil(in / group)], packed along the outputs; absent if symmetric
X.weight_g_idx       I32 [in]: the group of each input, where they are not neighbours ("actorder"); all are -1 where
                     none were calibrated, such as an expert that got no tokens

X.weight             I8 [out, in], with X.weight_scale, and X.weight_zero_point I8 of its shape
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from engine.models.checkpoint.formats.groups import InputGroups, group_size_of, sizes_in, stored_groups, why_not_coded
from engine.models.checkpoint.formats.module_tensors import ModuleTensors
from engine.models.checkpoint.packed_weight import PART_DTYPES, PackedWeight
from kernels.coded_weight import CodedMatrix, CodeFormat, StoredLayout
from kernels.dequant.coded_groups import coded_groups, format_of_groups
from kernels.dequant.integers import (
    dequantise_groups,
    dequantise_ordered,
    dequantise_packed,
    unpack_bits,
    unpack_floats,
)
from kernels.dequant.stored import BYTES, NIBBLES, SIGNED_BYTES

__all__ = ["CompressedIntegers", "compressed_integers"]

_SCALES = ("F32", "BF16", "F16")
_ROWS = 32  # of zero points begin with a whole word, whatever their bits


@dataclass(frozen=True, kw_only=True, eq=False)
class CompressedIntegers(PackedWeight):
    """Parts ``codes``, ``scale``, and maybe ``zero point`` and ``group index``.

    Attributes:
        bits: of a code.
        is_packed: codes and zero points are packed in words; else they are bytes.
        group_size: inputs with one scale.
        groups: what the group index says; None: the inputs of a group are neighbours.
    """

    format = "compressed-tensors integers"
    bits: int
    is_packed: bool
    group_size: int
    groups: InputGroups | None

    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows of one matrix in float32."""
        codes, scales, columns = parts["codes"], parts["scale"], self.shape[-1]
        scales = scales.view(-1, 1) if scales.dim() < 2 else scales
        zeros = self._zero_points(parts, rows, 1 << self.bits - 1 if self.is_packed else 0)
        if (group_of := parts.get("group index")) is None:
            if self.is_packed:
                return dequantise_packed(codes, self.bits, columns, scales, zeros, self.group_size, out=out)
            return dequantise_groups(codes, scales, zeros, self.group_size, out=out)
        if self.is_packed:
            codes = unpack_floats(codes, self.bits, columns)
        group_of = group_of.long()
        if columns and not 0 <= int(group_of.min()) <= int(group_of.max()) < scales.shape[1]:
            raise self.error("group index", f"names groups outside the {scales.shape[1]} that have scales")
        return dequantise_ordered(codes, scales, zeros, group_of)

    @property
    def code_format(self) -> CodeFormat | None:
        """How its codes are kept, in the order of their groups; None if they cannot be."""
        if self._may_exceed_codes or (self.groups is not None and self.groups.order is None):
            return None
        dtype, columns = PART_DTYPES[self.parts["scale"].dtype], self.shape[-1]
        if "zero point" in self.parts:
            form = format_of_groups(self.bits, self.group_size, columns, dtype, zero_kind="points")
        else:
            form = format_of_groups(self.bits, self.group_size, columns, dtype, zero=float(1 << self.bits - 1))
        return form if form is None or self.groups is None else replace(form, has_input_order=True)

    @property
    def _may_exceed_codes(self) -> bool:
        """Whether a zero point, which is a byte, may be outside the codes."""
        zeros = self.parts.get("zero point")
        return zeros is not None and zeros.dtype == "I8" and self.bits != 8

    @property
    def input_order(self) -> torch.Tensor | None:
        """The inputs group by group; None: they are in order."""
        return None if self.groups is None else self.groups.order

    @property
    def why_not_coded(self) -> str:
        """Why it has no ``code_format``."""
        if self._may_exceed_codes:
            return "their zero points are bytes, beside codes of fewer bits"
        return why_not_coded(self.group_size, self.groups)

    def coded(self, parts: Mapping[str, torch.Tensor], rows: range) -> CodedMatrix:
        """Return rows of one matrix as codes."""
        codes, scales, form, offset = parts["codes"], parts["scale"], self.code_format, 1 << self.bits - 1
        assert form is not None
        codes, columns, layout = codes.view(torch.uint8), self.shape[-1], self._layout
        if layout is None:
            codes = unpack_bits(codes, self.bits, columns) if self.is_packed else codes ^ offset
        zeros = self._zero_points(parts, rows, offset)
        scales = scales.view(-1, 1) if scales.dim() < 2 else scales
        points, order = None if isinstance(zeros, int) else zeros, self.input_order
        return coded_groups(form, codes, scales, zeros=points, input_order=order, layout=layout, num_inputs=columns)

    @property
    def keeps_stored_codes(self) -> bool:
        """Whether the codes are the stored bytes."""
        return self._layout is not None

    @property
    def _layout(self) -> StoredLayout | None:
        """How the codes are stored; None if they have to be unpacked."""
        if self.groups is not None:
            return None
        return {4: NIBBLES, 8: BYTES}.get(self.bits) if self.is_packed else SIGNED_BYTES

    def _zero_points(self, parts: Mapping[str, torch.Tensor], rows: range, offset: int) -> torch.Tensor | int:
        """Return what is subtracted from the codes: without zero points the code ``offset`` means zero."""
        zeros = parts.get("zero point")
        if zeros is None:
            return offset
        if self.parts["zero point"].dtype == "I8":
            zeros = zeros.view(-1, 1) if zeros.dim() < 2 else zeros
            return (zeros[rows.start : rows.stop] if len(zeros) > 1 else zeros).float() + offset
        words = zeros[rows.start * self.bits // 32 : -(-rows.stop * self.bits // 32)]
        return unpack_bits(words.t().contiguous(), self.bits, len(rows)).t()


def compressed_integers(module: ModuleTensors) -> Iterator[PackedWeight]:
    """Yield the weight of a module if it has one of these.

    Raises:
        ModelLoadError: if its tensors do not fit each other.
    """
    packed, plain = module.tensors.get("weight_packed"), module.tensors.get("weight")
    if module.find("weight_scale") is None:
        return
    if packed is not None and packed.dtype == "I32" and len(packed.shape) == 2:
        yield _packed_weight(module)
    elif plain is not None and plain.dtype == "I8" and len(plain.shape) == 2:
        yield _weight(module, "weight", 8, (plain.shape[0], plain.shape[1]))


def _packed_weight(module: ModuleTensors) -> PackedWeight:
    rows, words = module.tensors["weight_packed"].shape
    if module.find("weight_shape") is None:
        raise module.error("weight_packed", "has no weight_shape beside it")
    stored = module.tensors["weight_shape"]
    if stored.dtype not in ("I64", "I32") or stored.shape != (2,):
        raise module.error("weight_shape", f"has the dtype {stored.dtype} and the shape {list(stored.shape)}")
    content = module.read(stored)
    size = len(content) // 2
    shape = tuple(int.from_bytes(content[start : start + size], "little", signed=True) for start in (0, size))
    bits = words * 32 // shape[1] if shape[1] > 0 else 0
    if shape[0] != rows or not 1 <= bits <= 8 or -(-shape[1] * bits // 32) != words:
        raise module.error("weight_shape", f"is {list(shape)}, which does not fit weight_packed, {[rows, words]}")
    module.take(shape="weight_shape")
    return _weight(module, "weight_packed", bits, (shape[0], shape[1]))


def _weight(module: ModuleTensors, name: str, bits: int, shape: tuple[int, int]) -> PackedWeight:
    scale = module.tensors["weight_scale"]
    rows, columns = shape
    grid = scale.shape if len(scale.shape) > 1 else (*scale.shape, 1) if scale.shape else (1, 1)
    group_size = group_size_of(columns, grid[1], sizes_in(module.quantization.fields)) if len(grid) == 2 else None
    if scale.dtype not in _SCALES or group_size is None or grid[0] not in (1, rows):
        raise module.error(
            "weight_scale", f"is {scale.dtype} {list(scale.shape)}, which is not that of scales of {list(shape)}"
        )
    is_packed = name == "weight_packed"
    zero_point = module.find("weight_zero_point")
    if zero_point is not None:
        zeros = module.tensors[zero_point]
        words = (-(-rows * bits // 32), grid[1])
        if not (zeros.dtype == "I8" and zeros.shape == scale.shape) and not (
            is_packed and zeros.dtype == "I32" and zeros.shape == words
        ):
            raise module.error(zero_point, f"is {zeros.dtype} {list(zeros.shape)}, which does not fit the scales")
    group_index, groups = module.find("weight_g_idx"), None
    if group_index is not None:
        order = module.tensors[group_index]
        if order.dtype not in ("I32", "I64") or order.shape != (columns,):
            raise module.error(group_index, f"is {order.dtype} {list(order.shape)}, and not a group for each input")
        groups = stored_groups(module, group_index, group_size)
        if groups is None:
            module.take(order=group_index)
            group_index = None
    parts = module.take(
        **{"codes": name, "scale": "weight_scale", "zero point": zero_point, "group index": group_index}
    )
    return CompressedIntegers(
        name=module.full_name("weight"),
        parts=parts,
        shape=shape,
        read_by_rows=frozenset({"codes", "scale"} if grid[0] == rows and rows > 1 else {"codes"}),
        row_multiple=_ROWS,
        bits=bits,
        is_packed=is_packed,
        group_size=group_size,
        groups=groups,
    )
