"""GPTQ and AWQ: integers with scales and zero points for groups of inputs, stored transposed. AutoRound writes both.

                 GPTQ, 2, 3, 4 or 8 bits                           AWQ ("gemm"), 4 bits
    X.qweight    I32 [in * bits / 32, out], packed along in        I32 [in, out / 8], in an order of its own
    X.qzeros     I32 [groups, out * bits / 32], packed along out   I32 [groups, out / 8], in the same order
    X.scales     F16 [groups, out]                                 F16 [groups, out]
    X.g_idx      I32 [in]: the group of each input                 absent

The value is (code - zero point) * scale. GPTQ stores zero points minus one; its second version (``gptq_v2``) and
AutoRound's own packing (``auto_round:exllamav2`` and such) store them as they are. Both formats have the same names;
shapes distinguish them, and give the bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from engine.models.checkpoint.formats.groups import InputGroups, group_size_of, sizes_in, stored_groups, why_not_coded
from engine.models.checkpoint.formats.module_tensors import ModuleTensors
from engine.models.checkpoint.packed_weight import PART_DTYPES, PackedWeight
from engine.models.config.files.quantization import Quantization
from kernels.coded_weight import CodedMatrix, CodeFormat
from kernels.dequant.coded_groups import coded_groups, format_of_groups
from kernels.dequant.integers import (
    awq_nibbles,
    dequantise_awq,
    dequantise_gptq,
    dequantise_ordered,
    turn_words_to_rows,
    unpack_awq,
    unpack_bits,
    unpack_floats,
)
from kernels.dequant.stored import BYTES, NIBBLES
from kernels.dequant.transposed import write_transposed

__all__ = ["AwqWeight", "GptqWeight", "gptq_awq_weights"]

_SCALES = ("F32", "BF16", "F16")
_VERSION = ("checkpoint_format", "format")  # the older and the newer name of the config's field
_GPTQ_BITS = (2, 3, 4, 8)
_LARGE = 3e38  # is finite in bfloat16
_ROWS = 128  # whole tiles of what is decoded in one pass, and whole words of zero points, whatever their bits


@dataclass(frozen=True, kw_only=True, eq=False)
class GptqWeight(PackedWeight):
    """Parts ``qweight``, ``qzeros``, ``scales``, and maybe ``g_idx``.

    Attributes:
        bits: of a code.
        group_size: inputs with one scale.
        groups: what ``g_idx`` says; None: the inputs of a group are neighbours.
        stores_minus_one: zero points are one more than stored.
    """

    format = "GPTQ"
    bits: int
    group_size: int
    groups: InputGroups | None
    stores_minus_one: bool

    def prepared(self, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parts with scales and zero points for rows, float32 [rows, groups]."""
        zeros = unpack_bits(parts["qzeros"], self.bits, self.shape[-2])
        if self.stores_minus_one:
            zeros = (zeros + 1) & (1 << self.bits) - 1
        return parts | _by_outputs(parts["scales"], zeros)

    @property
    def code_format(self) -> CodeFormat | None:
        """How its codes are kept, in the order of their groups."""
        form = _format(self, self.bits, self.group_size)
        if form is None or self.groups is None:
            return form
        return None if self.groups.order is None else replace(form, has_input_order=True)

    @property
    def input_order(self) -> torch.Tensor | None:
        """The inputs group by group; None: they are in order."""
        return None if self.groups is None else self.groups.order

    @property
    def why_not_coded(self) -> str:
        """Why it has no ``code_format``."""
        return why_not_coded(self.group_size, self.groups)

    def coded(self, parts: Mapping[str, torch.Tensor], rows: range) -> CodedMatrix:
        """Return rows of the matrix as codes."""
        own, form = slice(rows.start, rows.stop), self.code_format
        assert form is not None
        words, columns, order = turn_words_to_rows(parts["qweight"], own), self.shape[-1], self.input_order
        layout = {4: NIBBLES, 8: BYTES}.get(self.bits) if order is None else None
        codes = words.view(torch.uint8) if layout is not None else unpack_bits(words, self.bits, columns)
        scales, zeros = parts["scales"][own], parts["zeros"][own]
        return coded_groups(form, codes, scales, zeros=zeros, input_order=order, layout=layout, num_inputs=columns)

    @property
    def keeps_stored_codes(self) -> bool:
        """Whether the codes are the stored ones, transposed."""
        return self.bits in (4, 8) and self.groups is None

    def are_bounded(self, parts: Mapping[str, torch.Tensor]) -> bool:
        """Whether the parts show that all numbers are finite."""
        return bool(parts["largest scale"] * 2**self.bits < _LARGE)

    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows of the matrix in float32."""
        columns, bits, own = self.shape[-1], self.bits, slice(rows.start, rows.stop)
        words, scales, zeros = parts["qweight"], parts["scales"][own], parts["zeros"][own]
        if (group_of := parts.get("g_idx")) is None:
            return dequantise_gptq(words, own, bits, columns, scales, zeros, self.group_size, out=out)
        codes = turn_words_to_rows(words, own)
        group_of = group_of.long()
        if columns and not 0 <= int(group_of.min()) <= int(group_of.max()) < scales.shape[1]:
            raise self.error("g_idx", f"names groups outside the {scales.shape[1]} that have scales")
        return dequantise_ordered(unpack_floats(codes, bits, columns), scales, zeros, group_of)


@dataclass(frozen=True, kw_only=True, eq=False)
class AwqWeight(PackedWeight):
    """Parts ``qweight``, ``qzeros`` and ``scales``; ``group_size``: inputs with one scale."""

    format = "AWQ"
    group_size: int

    @property
    def code_format(self) -> CodeFormat | None:
        """How its codes are kept as they are."""
        return _format(self, 4, self.group_size)

    @property
    def why_not_coded(self) -> str:
        """Why it has no ``code_format``."""
        return why_not_coded(self.group_size)

    def coded(self, parts: Mapping[str, torch.Tensor], rows: range) -> CodedMatrix:
        """Return rows of the matrix as codes."""
        own, form = slice(rows.start, rows.stop), self.code_format
        assert form is not None
        words = slice(rows.start // 8, -(-rows.stop // 8))
        codes = awq_nibbles(parts["qweight"], words)
        scales, zeros, columns = parts["scales"][own], parts["zeros"][own], self.shape[-1]
        return coded_groups(form, codes, scales, zeros=zeros, layout=NIBBLES, num_inputs=columns)

    @property
    def keeps_stored_codes(self) -> bool:
        """Whether the codes are the stored ones, transposed."""
        return True

    def prepared(self, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parts with scales and zero points for rows, float32 [rows, groups]."""
        return parts | _by_outputs(parts["scales"], unpack_awq(parts["qzeros"]).t())

    def are_bounded(self, parts: Mapping[str, torch.Tensor]) -> bool:
        """Whether the parts show that all numbers are finite."""
        return bool(parts["largest scale"] * 16 < _LARGE)

    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows of the matrix in float32."""
        words, own = slice(rows.start // 8, -(-rows.stop // 8)), slice(rows.start, rows.stop)
        scales, zeros = parts["scales"][own], parts["zeros"][own]
        return dequantise_awq(parts["qweight"], words, scales, zeros, self.group_size, out=out)


def _format(weight: PackedWeight, bits: int, group_size: int) -> CodeFormat | None:
    dtype = PART_DTYPES[weight.parts["scales"].dtype]
    return format_of_groups(bits, group_size, weight.shape[-1], dtype, zero_kind="points")


def _by_outputs(scales: torch.Tensor, zeros: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return scales and zero points, [groups, rows], in float32 as [rows, groups], and the largest scale."""
    turned = {name: torch.empty(scales.shape[::-1]) for name in ("scales", "zeros")}
    for name, values in (("scales", scales), ("zeros", zeros)):
        write_transposed(turned[name], values.float().contiguous())
    return turned | {"largest scale": scales.abs().max()}  # NaN if one is


def gptq_awq_weights(module: ModuleTensors) -> Iterator[PackedWeight]:
    """Yield the weight of a module if it has one of these.

    Raises:
        ModelLoadError: if its tensors do not fit each other.
    """
    if module.find("qweight") is None:
        return
    for name in ("qzeros", "scales"):
        if module.find(name) is None:
            raise module.error("qweight", f"has no {name} beside it")
    qweight, qzeros, scales = (module.tensors[name] for name in ("qweight", "qzeros", "scales"))
    for name, tensor, dtypes in (
        ("qweight", qweight, ("I32",)),
        ("qzeros", qzeros, ("I32",)),
        ("scales", scales, _SCALES),
    ):
        if tensor.dtype not in dtypes or len(tensor.shape) != 2 or 0 in tensor.shape:
            raise module.error(name, f"is {tensor.dtype} {list(tensor.shape)}, which GPTQ and AWQ do not have")
    if qweight.shape[1] * 8 == scales.shape[1]:
        yield _awq(module, rows=scales.shape[1], columns=qweight.shape[0])
    elif qweight.shape[1] == scales.shape[1]:
        yield _gptq(module, rows=scales.shape[1])
    else:
        raise module.error(
            "qweight",
            f"is {list(qweight.shape)}, which neither GPTQ nor AWQ (gemm) has beside scales of {list(scales.shape)}",
        )


def _group_size(module: ModuleTensors, columns: int) -> int:
    num_groups = module.tensors["scales"].shape[0]
    size = group_size_of(columns, num_groups, sizes_in(module.quantization.fields))
    if size is None and module.find("g_idx") is not None:
        size = -(-columns // num_groups)  # what counts is which group each input has
    if size is None:
        raise module.error("scales", f"has {num_groups} groups, which do not divide {columns} inputs")
    return size


def _require_zeros(module: ModuleTensors, shape: tuple[int, int]) -> None:
    if (stored := module.tensors["qzeros"].shape) != shape:
        raise module.error("qzeros", f"is {list(stored)}, but the scales need {list(shape)}")


def _awq(module: ModuleTensors, rows: int, columns: int) -> PackedWeight:
    _require_zeros(module, (module.tensors["scales"].shape[0], rows // 8))
    size = _group_size(module, columns)
    return AwqWeight(
        name=module.full_name("weight"),
        parts=module.take(qweight="qweight", qzeros="qzeros", scales="scales"),
        shape=(rows, columns),
        row_multiple=_ROWS,
        group_size=size,
    )


def _gptq(module: ModuleTensors, rows: int) -> PackedWeight:
    words, order = module.tensors["qweight"].shape[0], module.tensors.get("g_idx")
    bits = module.tensors["qzeros"].shape[1] * 32 // rows
    columns = words * 32 // bits if bits else 0
    if order is not None:
        if order.dtype not in ("I32", "I64") or len(order.shape) != 1:
            raise module.error("g_idx", f"is {order.dtype} {list(order.shape)}, and not a group for each input")
        columns = order.shape[0]
    if bits not in _GPTQ_BITS or -(-columns * bits // 32) != words:
        raise module.error(
            "qweight", f"has {words} words for each output, which do not fit codes of {bits} bits for {columns} inputs"
        )
    _require_zeros(module, (module.tensors["scales"].shape[0], -(-rows * bits // 32)))
    size = _group_size(module, columns)
    groups = None if order is None else stored_groups(module, "g_idx", size)
    if order is not None and groups is None:
        module.take(order="g_idx")
    return GptqWeight(
        name=module.full_name("weight"),
        parts=module.take(qweight="qweight", qzeros="qzeros", scales="scales", g_idx="g_idx" if groups else None),
        shape=(rows, columns),
        row_multiple=_ROWS,
        bits=bits,
        group_size=size,
        groups=groups,
        stores_minus_one=_stores_minus_one(module.quantization),
    )


def _stores_minus_one(quantization: Quantization) -> bool:
    """Return whether zero points are one more than stored. AutoRound's older versions call the packing a backend."""
    fields = quantization.fields
    if quantization.method != "auto-round":
        return "gptq_v2" not in (str(fields.get(key)).lower() for key in _VERSION)
    packing = str(fields.get("packing_format") or fields.get("backend"))
    return not packing.startswith("auto_round") or "gptq" in packing.replace("gptqmodel", "")
