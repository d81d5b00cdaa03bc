"""CodedLinear: a linear layer's weights as codes of a few bits, packed for the C kernels.

csrc/coded/codes.h draws the layout. A weight is packed once; the tensors it came from are not needed afterwards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

import torch

from kernels.coded_weight import BLOCK_INPUTS, CodedMatrix, CodedWeight, CodeFormat, Section
from kernels.cpu.bindings import CCodedPanels, CCodeFormat, CWeight, address
from kernels.cpu.library import require
from kernels.cpu.linear import LANES, PANELS_AT_ONCE, PackedLinear, WeightKind, put_lanes
from kernels.cpu.memory import huge_zeros
from kernels.cpu.stored_codes import pack_stored

__all__ = ["NOT_CODED", "SECTION_OUTPUTS", "Coded", "CodedLinear", "format_at_load", "packed_linear", "quantize_codes"]

SECTION_OUTPUTS = LANES * PANELS_AT_ONCE  # that are read together
_OUTER_TYPES = ("float16", "bfloat16", "float32")  # in the order of codes.h, as the kinds of zeros
_ZERO_KINDS = ("constant", "points", "minima")
_FLOATS = (None, "e4m3", "e5m2")

Coded = Mapping[str, Sequence[Section]]  # the sections of the weights that stay codes, by their names
NOT_CODED: Coded = MappingProxyType({})


def packed_linear(
    kind: WeightKind,
    in_features: int,
    out_features: int,
    *,
    has_bias: bool = False,
    sections: Sequence[Section] | None = None,
) -> PackedLinear:
    """Return packed weights: coded ones if there are ``sections``, else of this ``kind``."""
    if sections is None:
        return PackedLinear(kind, in_features, out_features, has_bias=has_bias)
    return CodedLinear(sections, in_features, out_features, has_bias=has_bias)


def format_at_load(bits: int) -> CodeFormat:
    """Return the format that weights are quantized to while they are loaded: symmetric, in groups of 32 inputs."""
    return CodeFormat(bits=bits, outer_type="bfloat16", zero=float(1 << bits - 1))


def quantize_codes(weight: torch.Tensor, bits: int) -> CodedMatrix:
    """Return a weight [out_features, in_features] in the ``format_at_load``.

    The scale of a group is searched for among those near the one that its largest number gives, for the least squared
    error, as llama.cpp searches for those of its formats; no sample of activations is needed.
    """
    weight = (weight if weight.dtype in (torch.float32, torch.bfloat16) else weight.float()).contiguous()
    num_rows, width = weight.shape
    codes = torch.empty(num_rows, width, dtype=torch.uint8)
    scales = torch.empty(num_rows, -(-width // BLOCK_INPUTS), dtype=torch.bfloat16)
    is_bf16 = weight.dtype == torch.bfloat16
    addresses = codes.data_ptr(), scales.data_ptr(), weight.data_ptr()
    require().pagoda_quantize_codes(*addresses, is_bf16, num_rows, width, bits)
    return CodedMatrix(format=format_at_load(bits), codes=codes, outer_scales=scales)


class CodedLinear(PackedLinear):
    """Packed codes [out_features, in_features], zero until they are set.

    Args:
        sections: the outputs' formats, in order: of floats, or none of them; with an order of inputs, or none of them.
            All but the last have a multiple of `SECTION_OUTPUTS`.
        in_features: elements of a row.
        out_features: rows; the last section is as long as it takes.
        has_bias: whether there is a bias, which is kept in float32.

    Attributes:
        words: the packed codes and their factors, int32.
    """

    def __init__(
        self, sections: Sequence[Section], in_features: int, out_features: int, *, has_bias: bool = False
    ) -> None:
        assert all(section.num_outputs % SECTION_OUTPUTS == 0 for section in sections[:-1])
        (has_floats,) = {section.format.floats is not None for section in sections}
        (has_order,) = {section.format.has_input_order for section in sections}
        self.kind = WeightKind.FLOAT_CODED if has_floats else WeightKind.CODED
        self.in_features, self.out_features = in_features, out_features
        num_last = out_features - sum(section.num_outputs for section in sections[:-1])
        sections = [*sections[:-1], Section(sections[-1].format, num_last)]
        self._sections = [_Panels(section, in_features) for section in sections]
        self.words = huge_zeros((sum(panels.num_bytes for panels in self._sections) // 4,), torch.int32)
        num_panels = sum(panels.count for panels in self._sections)
        self._bias = torch.zeros(num_panels * LANES) if has_bias else None
        has_scales = any(section.format.has_output_scales for section in sections)
        self._scales = torch.ones(num_panels * LANES) if has_scales else None
        self._order = torch.arange(in_features, dtype=torch.int32) if has_order else None
        groups: list[CCodedPanels] = []
        start = 0
        for panels in self._sections:
            step = PANELS_AT_ONCE * panels.panel_bytes
            starts = range(start, start + panels.num_bytes, step)
            groups += [CCodedPanels(at, ctypes.pointer(panels.c_format)) for at in starts]
            start += panels.num_bytes
        self._groups = (CCodedPanels * len(groups))(*groups)
        self.c_weight = CWeight(
            self.words.data_ptr(),
            address(self._scales),
            None,
            address(self._bias),
            ctypes.addressof(self._groups),
            address(self._order),
            self.kind,
            in_features,
            self.out_features,
        )

    def set_weight(
        self, weight: torch.Tensor | CodedWeight, *, first_output: int = 0, every: int = 1, offset: int = 0
    ) -> None:
        """Pack rows; their formats are those that the sections have there.

        Args:
            weight: coded, or numbers to quantize to the only section's ``format_at_load``; zeros follow shorter rows.
                All parts of the weights have the same order of inputs.
            first_output: as for `PackedLinear`; only where there is one section.
            every: as for `PackedLinear`, likewise.
            offset: see ``every``.
        """
        if isinstance(weight, torch.Tensor):
            (section,) = self._sections
            weight = CodedWeight((quantize_codes(weight, section.format.bits),))
        assert len(weight.sections) == len(self._sections)
        if self._order is not None:
            assert weight.input_order is not None
            self._order[: len(weight.input_order)] = weight.input_order
        first_byte = first_panel = 0
        octets = self.words.view(torch.uint8)
        for panels, matrix in zip(self._sections, weight.sections, strict=True):
            assert matrix.format == panels.format
            where = {"first_output": first_output, "every": every, "offset": offset}
            pack_stored(octets[first_byte:], panels.c_format, matrix, self.in_features, **where)
            if matrix.output_scales is not None:
                assert self._scales is not None
                put_lanes(self._scales[first_panel * LANES :], matrix.output_scales, **where)
            first_byte, first_panel = first_byte + panels.num_bytes, first_panel + panels.count


class _Panels:
    """The panels of one section."""

    def __init__(self, section: Section, in_features: int) -> None:
        self.format = section.format
        self.panel_bytes = int(require().pagoda_panel_bytes(self.c_format, in_features))
        self.count = -(-section.num_outputs // SECTION_OUTPUTS) * PANELS_AT_ONCE
        self.num_bytes = self.count * self.panel_bytes

    @cached_property
    def c_format(self) -> CCodeFormat:
        """The format as C has it."""
        form = self.format
        return CCodeFormat(
            form.bits,
            form.granule,
            form.granules_per_outer,
            _OUTER_TYPES.index(form.outer_type),
            form.has_inner,
            _ZERO_KINDS.index(form.zero_kind),
            bool(form.levels),
            _FLOATS.index(form.floats),
            form.zero,
            (ctypes.c_uint8 * 16)(*form.levels),
        )
