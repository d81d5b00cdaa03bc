"""CodedSection: outputs of a coded weight that have one format, packed for the Triton kernel of coded_triton.py.

    codes            [num_blocks, out_features, width]   a word has the codes of ``per_word`` inputs
    a factor         [num_parts, out_features]           of the type that the checkpoint has

A part is ``width`` neighbouring inputs with the same factors, and a block is as many parts as a word has codes: word i
of an output has input i of each of the block's parts, the first one in its lowest bits. So the codes that a program
reads at once lie one after the other, and so do the factors of its outputs. Linear layers have words of two bytes: two
of these in a register become two activations' worth of a product's operand, without moving bytes.

A weight takes 8 * word_bytes / per_word bits (4 or 8; 2 if its codes have 2) and the checkpoint's own factors: 4.6 bits
of Q4_K, 4.5 of Q4_0 and MXFP4, 4.2 of GPTQ in groups of 128, 8.5 of Q8_0, 8.6 of Q6_K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from kernels.coded_weight import CodedMatrix, CodeFormat
from kernels.dequant.stored import unpacked

__all__ = ["FACTORS", "CodedLayout", "CodedSection"]

FACTORS = ("outer_scales", "outer_minima", "zero_points", "inner_scales", "inner_minima")

_LARGEST_WIDTH = 64  # inputs that are multiplied at once
_LARGEST_BLOCK = 128  # inputs of a block of words


@dataclass(frozen=True)
class CodedLayout:
    """How the codes of a format are packed.

    Attributes:
        format: how codes become numbers.
        in_features: of an output.
        word_bytes: 1 or 2.
    """

    format: CodeFormat
    in_features: int
    word_bytes: int = 1

    @property
    def width(self) -> int:
        """Inputs of a part."""
        form = self.format
        if form.has_inner:  # whose factors are those of one part each
            return form.granule
        most = _LARGEST_WIDTH if self.word_bytes == 1 else _LARGEST_BLOCK // self.per_word
        return min(form.granule * form.granules_per_outer, most, _LARGEST_WIDTH)

    @property
    def group(self) -> int:
        """Neighbouring inputs with the same scale."""
        return self.width if self.format.has_inner else self.width * self.parts_per_outer

    @property
    def per_word(self) -> int:
        """Codes of a word."""
        bits = self.format.bits
        return 8 * self.word_bytes // (2 if bits == 2 else 4 if bits <= 4 else 8)

    @property
    def parts_per_outer(self) -> int:
        """Neighbouring parts with the same outer factors."""
        return self.format.granule * self.format.granules_per_outer // self.width

    @property
    def num_blocks(self) -> int:
        """Blocks of an output."""
        return -(-self.in_features // (self.width * self.per_word))

    @property
    def num_parts(self) -> int:
        """Parts of an output, with those that fill its last block: the number of rows of inner factors."""
        return self.num_blocks * self.per_word

    @property
    def num_outers(self) -> int:
        """Rows of outer factors."""
        return -(-self.num_parts // self.parts_per_outer)


class CodedSection(nn.Module):
    """A coded matrix on a device.

    Args:
        matrix: on any device.
        out_features: outputs; those that the matrix lacks have weights of zero.
        device: of the packed tensors.
        word_bytes: of a word of codes.

    Attributes:
        layout: how it is packed.
        codes: uint8 or uint16, as the module's docstring draws it.
        outer_scales: of the format's type, [num_outers, out_features].
        outer_minima: likewise; None without minima.
        zero_points: uint8, of the same shape; None without zero points.
        inner_scales: int8 [num_parts, out_features]; None without inner factors.
        inner_minima: uint8, likewise; None without minima.
        output_scales: float32 [out_features], or None.
    """

    codes: torch.Tensor
    outer_scales: torch.Tensor
    outer_minima: torch.Tensor | None
    zero_points: torch.Tensor | None
    inner_scales: torch.Tensor | None
    inner_minima: torch.Tensor | None
    output_scales: torch.Tensor | None

    def __init__(self, matrix: CodedMatrix, out_features: int, device: torch.device, *, word_bytes: int = 1) -> None:
        super().__init__()
        self.out_features, self.layout = out_features, CodedLayout(matrix.format, matrix.shape[1], word_bytes)
        matrix = unpacked(matrix.with_parts({name: part.to(device) for name, part in matrix.parts.items()}))
        counts = {"inner_scales": self.layout.num_parts, "inner_minima": self.layout.num_parts}
        for name in FACTORS:
            part = matrix.parts.get(name)
            count = counts.get(name, self.layout.num_outers)
            self._set(name, None if part is None else self._by_part(part, count))
        scales = matrix.output_scales
        self._set("output_scales", None if scales is None else F.pad(scales, (0, self._num_missing(scales))))
        self._set("codes", self._packed(matrix.codes))

    def _set(self, name: str, value: torch.Tensor | None) -> None:
        self.register_parameter(name, None if value is None else nn.Parameter(value, requires_grad=False))

    def _num_missing(self, rows: torch.Tensor) -> int:
        return self.out_features - len(rows)

    def _by_part(self, factors: torch.Tensor, count: int) -> torch.Tensor:
        """Return factors [rows, any] as [count, out_features]; those of inputs and outputs that do not exist are 0."""
        factors = factors[:, :count]
        return F.pad(factors, (0, count - factors.shape[1], 0, self._num_missing(factors))).t().contiguous()

    def _packed(self, codes: torch.Tensor) -> torch.Tensor:
        num_blocks, per_word, width = self.layout.num_blocks, self.layout.per_word, self.layout.width
        missing = num_blocks * per_word * width - self.layout.in_features
        codes = F.pad(codes, (0, missing, 0, self._num_missing(codes)))
        by_block = codes.view(self.out_features, num_blocks, per_word, width).transpose(0, 1)
        per_byte, packed = per_word // self.layout.word_bytes, []
        for first in range(0, per_word, per_byte):
            octets = by_block[:, :, first].contiguous()
            for part in range(1, per_byte):
                octets |= by_block[:, :, first + part] << (8 // per_byte * part)
            packed.append(octets)
        return packed[0] if len(packed) == 1 else torch.stack(packed, dim=3).view(torch.uint16).squeeze(3)
