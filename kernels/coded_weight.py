"""CodeFormat and CodedMatrix: weights that stay codes of a few bits, with scales of groups of inputs.

The formats of quantised checkpoints (GGUF's blocks, GPTQ, AWQ, compressed-tensors' integers, MXFP4, NVFP4, FP8) are all

    weight = scale * (level - zero)     or     weight = scale * level - minimum

where the level is the code, what a table of 16 has for it, or the float of 8 bits that it is. A format reads its codes
and factors into a CodedMatrix; a linear method packs them for its device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch

__all__ = [
    "BLOCK_INPUTS",
    "SEGMENT_INPUTS",
    "SMALLEST_NOT_FINITE",
    "Activations",
    "CodeFormat",
    "CodedMatrix",
    "CodedWeight",
    "Floats",
    "OuterType",
    "Section",
    "StoredLayout",
    "StoredScales",
    "Weight",
    "Zero",
    "decode",
    "halves",
]

BLOCK_INPUTS = 32  # inputs that are packed together
SMALLEST_NOT_FINITE: Mapping[str, int] = {"e4m3": 0x7F, "e5m2": 0x7C}  # the least code but for its sign
SEGMENT_INPUTS = 256  # whose factors are packed together: groups have a power of two of inputs, or a multiple of it

OuterType = Literal["float16", "bfloat16", "float32"]
Zero = Literal["constant", "points", "minima"]
Floats = Literal["e4m3", "e5m2"]
Activations = Literal["groups", "tokens"]
StoredScales = Literal["e4m3 halves", "e8m0 halves", "e8m0"]


@dataclass(frozen=True, kw_only=True)
class CodeFormat:
    """How the codes of a weight become numbers.

    Attributes:
        bits: of a code, 2 to 8.
        granule: neighbouring inputs with one scale and minimum, 16 or 32. Larger groups have ``granules_per_outer``.
        granules_per_outer: neighbouring granules with the same outer factors.
        outer_type: of the outer scales, and minima.
        has_inner: scales, and minima, are products of an outer factor and of one of a granule, a byte.
        zero_kind: what is subtracted: ``zero`` from each level, a zero point from the levels, or a minimum.
        zero: see ``zero_kind``.
        levels: of codes of 4 bits, from 0 to 255; empty: the codes are the levels.
        floats: which floats the codes of 8 bits are; None: they are integers. Nothing is subtracted from floats.
        has_output_scales: each output is multiplied by a float32 of its own as well.
        has_input_order: codes lie in another order than the inputs that they multiply, so that groups are neighbours.
        activations: whether the checkpoint's scheme quantises activations to the same floats, and which of them have
            one scale: "groups" of 128 inputs, or "tokens"; None: it does not. What computes with codes may do without.
    """

    bits: int
    granule: int = 32
    granules_per_outer: int = 1
    outer_type: OuterType = "float16"
    has_inner: bool = False
    zero_kind: Zero = "constant"
    zero: float = 0.0
    levels: tuple[int, ...] = ()
    floats: Floats | None = None
    has_output_scales: bool = False
    has_input_order: bool = False
    activations: Activations | None = None

    def __post_init__(self) -> None:
        """Assert that the kernels know it."""
        outers = self.granules_per_outer
        assert 2 <= self.bits <= 8
        assert self.granule in (16, 32)
        assert outers & outers - 1 == 0 or outers * self.granule % SEGMENT_INPUTS == 0
        assert not self.levels or (self.bits == 4 and len(self.levels) == 16)
        has_only_scales = self.zero_kind == "constant" and not (self.zero or self.has_inner)
        assert self.floats is None or (self.bits == 8 and self.granule == BLOCK_INPUTS and has_only_scales)

    @property
    def with_output_scales(self) -> CodeFormat:
        """The same with a factor of each output."""
        return replace(self, has_output_scales=True)

    @property
    def code_dtype(self) -> torch.dtype:
        """What a code of 8 bits is."""
        dtypes = {None: torch.uint8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
        return dtypes[self.floats]

    @property
    def outer_dtype(self) -> torch.dtype:
        """Torch's name for ``outer_type``."""
        dtype: torch.dtype = getattr(torch, self.outer_type)
        return dtype

    @property
    def group(self) -> int:
        """Neighbouring inputs with the same outer factors. A part of a weight's inputs begins at a multiple of it."""
        return max(self.granule * self.granules_per_outer, BLOCK_INPUTS)

    def num_granules(self, in_features: int) -> int:
        """Granules of an output, with those of inputs that fill its last block."""
        return -(-in_features // BLOCK_INPUTS) * (BLOCK_INPUTS // self.granule)

    def num_outers(self, in_features: int) -> int:
        """Outer factors of an output."""
        return -(-self.num_granules(in_features) // self.granules_per_outer)


@dataclass(frozen=True)
class Section:
    """Neighbouring outputs of a weight that have one format."""

    format: CodeFormat
    num_outputs: int


@dataclass(frozen=True)
class StoredLayout:
    """How a file has the codes of an output, which are unpacked when they are packed for a device.

    Attributes:
        codes: "bytes"; "signed bytes", which are 128 less than the codes; "nibbles", two codes a byte, the first one in
            the low half; "high nibbles", the first one in the high half; or a type of GGUF's, as ggml calls it, whose
            blocks have the factors in them.
        scales: what each byte of the outer scales means: half of a float of 8 bits, a power of two, or half of one;
            None: they are numbers.
    """

    codes: str
    scales: StoredScales | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class CodedMatrix:
    """A weight [out_features, in_features] as codes and factors, on the CPU.

    Attributes:
        format: how to decode them.
        codes: uint8 [out_features, in_features], one a byte; floats are their bits. As a file has them with a
            ``layout``: [out_features, bytes of a row].
        outer_scales: of the format's ``outer_type``, [out_features, num_outers].
        outer_minima: of the same type and shape; only with minima.
        zero_points: uint8 [out_features, num_outers]; only with zero points.
        inner_scales: int8 [out_features, num_granules]; only with inner factors.
        inner_minima: uint8 [out_features, num_granules]; only with inner factors and minima.
        output_scales: float32 [out_features]; only if the format has them.
        activation_scales: float32 [out_features], of all activations, the same for the outputs of one stored matrix;
            only if the scheme has scales that do not follow from the activations.
        input_order: int32 [in_features], the input that each column of codes multiplies; only if the format has one.
        layout: how the file has codes, and outer scales; None: codes are bytes. `unpacked` of kernels/dequant/stored.py
            returns the matrix without it.
        stored_inputs: in_features, where there is a ``layout``.
    """

    format: CodeFormat
    codes: torch.Tensor
    outer_scales: torch.Tensor
    outer_minima: torch.Tensor | None = None
    zero_points: torch.Tensor | None = None
    inner_scales: torch.Tensor | None = None
    inner_minima: torch.Tensor | None = None
    output_scales: torch.Tensor | None = None
    activation_scales: torch.Tensor | None = None
    input_order: torch.Tensor | None = None
    layout: StoredLayout | None = None
    stored_inputs: int = 0

    @property
    def shape(self) -> torch.Size:
        """Outputs and inputs."""
        return self.codes.shape if self.layout is None else torch.Size((len(self.codes), self.stored_inputs))

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors by name that have a row for each output."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "input_order"}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def with_parts(self, parts: Mapping[str, torch.Tensor]) -> CodedMatrix:
        """Return a matrix of this format and layout with other tensors, by name."""
        return CodedMatrix(
            format=self.format,
            input_order=self.input_order,
            layout=self.layout,
            stored_inputs=self.stored_inputs,
            **parts,
        )

    def times(self, factor: float) -> CodedMatrix:
        """Return the matrix times a factor, which its output scales have."""
        scales = torch.ones(self.shape[0]) if self.output_scales is None else self.output_scales
        return replace(self, format=self.format.with_output_scales, output_scales=scales * factor)

    def rows(self, index: slice | list[int] | torch.Tensor) -> CodedMatrix:
        """Return some outputs, in the order of ``index``."""
        return self.with_parts({name: part[index] for name, part in self.parts.items()})

    def columns(self, start: int, stop: int) -> CodedMatrix:
        """Return some inputs; both are multiples of the format's group, or the end, and the inputs are in order."""
        form = self.format
        assert not form.has_input_order
        assert self.layout is None
        units = {"codes": 1, "inner_scales": form.granule, "inner_minima": form.granule}
        units |= {"output_scales": 0, "activation_scales": 0}
        parts = {}
        for name, part in self.parts.items():
            unit = units.get(name, form.granule * form.granules_per_outer)
            parts[name] = part[:, start // unit : -(-stop // unit)].contiguous() if unit else part
        return self.with_parts(parts)


@dataclass(frozen=True, eq=False)
class CodedWeight:
    """A weight of one or several coded matrices, one below the other; fused projections may have several formats.

    Attributes:
        sections: neighbours differ in format. All have the same order of inputs.
    """

    sections: tuple[CodedMatrix, ...]

    @property
    def input_order(self) -> torch.Tensor | None:
        """The input that each column of codes multiplies, int32 [in_features]; None: they are in order."""
        return self.sections[0].input_order

    def chunk(self, count: int) -> list[CodedWeight]:
        """Return as many parts with equally many outputs; the weight has one format."""
        (matrix,) = self.sections
        size = matrix.shape[0] // count
        return [CodedWeight((matrix.rows(slice(start, start + size)),)) for start in range(0, size * count, size)]


Weight = torch.Tensor | CodedWeight


def halves(weight: Weight) -> Sequence[Weight]:
    """Return the upper and the lower outputs of a weight, which has one format."""
    return list(weight.chunk(2))


def decode(matrix: CodedMatrix) -> torch.Tensor:
    """Return the weights of a matrix without a ``layout``, float32 [out_features, in_features], plainly."""
    assert matrix.layout is None
    form, (_, in_features) = matrix.format, matrix.shape
    levels = matrix.codes.view(form.code_dtype).float()
    if form.levels:
        levels = torch.tensor(form.levels, dtype=torch.float32)[matrix.codes.long()]

    def spread(factors: torch.Tensor, inputs: int) -> torch.Tensor:
        return factors.float().repeat_interleave(min(inputs, in_features), dim=1)[:, :in_features]

    outer = form.granule * form.granules_per_outer
    scales = spread(matrix.outer_scales, outer)
    if matrix.inner_scales is not None:
        scales = scales * spread(matrix.inner_scales, form.granule)
    if form.zero_kind == "constant":
        weight = scales * (levels - form.zero)
    elif matrix.zero_points is not None:
        weight = scales * (levels - spread(matrix.zero_points, outer))
    else:
        assert matrix.outer_minima is not None
        minima = spread(matrix.outer_minima, outer)
        if matrix.inner_minima is not None:
            minima = minima * spread(matrix.inner_minima, form.granule)
        weight = scales * levels - minima
    if matrix.output_scales is not None:
        weight = weight * matrix.output_scales.unsqueeze(1)
    if matrix.input_order is not None:
        weight = torch.empty_like(weight).index_copy_(1, matrix.input_order.long(), weight)
    return weight
