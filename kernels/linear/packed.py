"""Linear layers on weights packed for the C kernels of kernels/cpu, which give a row the same bits in every batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from kernels.coded_weight import Section
from kernels.cpu.coded_linear import format_at_load, packed_linear
from kernels.cpu.library import library
from kernels.cpu.linear import WeightKind, has_int8, linear
from kernels.linear.base import LinearMethod

__all__ = ["CpuLinear", "PackedInt4Linears", "PackedInt8Linears", "PackedLinears"]

_KINDS = {torch.float32: WeightKind.FLOAT32, torch.bfloat16: WeightKind.BFLOAT16}


class PackedLinears(LinearMethod):
    """Packs weights in their own dtype. Our own decoder packs whole layers of this ``kind`` instead.

    Attributes:
        kind: the type of the packed weights.
    """

    name: ClassVar[str] = "packed"

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.kind = _KINDS[dtype]

    @classmethod
    def why_unusable(cls) -> str | None:
        """Return why the kernels cannot run on this machine; None if they can."""
        return "the C kernels cannot be compiled" if library() is None else None

    def layer(self, linear: nn.Linear) -> nn.Module:
        """Return a layer with the weights of ``linear``, packed."""
        return CpuLinear(linear, self.kind)


class PackedInt8Linears(PackedLinears):
    """Packs weights as int8."""

    name = "packed_int8"

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.kind = WeightKind.INT8

    @classmethod
    def why_unusable(cls) -> str | None:
        """Return why the kernels cannot multiply int8 on this machine; None if they can."""
        return super().why_unusable() or (None if has_int8() else "the processor has no instruction for int8")


class PackedInt4Linears(PackedLinears):
    """Packs weights as codes of 4 bits with scales for groups of 32 inputs, and those of a head as codes of 8 bits.

    What our own decoder does not keep as codes has the ``kind``.
    """

    name = "packed_int4"
    bits, head_bits = 4, 8

    def layer(self, linear: nn.Linear) -> nn.Module:
        """Return a layer with the weights of ``linear``, packed as codes."""
        return CpuLinear(linear, self.kind, [Section(format_at_load(self.bits), len(linear.weight))])


class CpuLinear(nn.Module):
    """A linear layer on packed weights.

    Args:
        layer: whose weights are packed, float32 or bfloat16, on the CPU.
        kind: the type of the packed weights.
        sections: of weights that are packed as codes.

    Attributes:
        weight: its dtype and device, which some modules ask for; it holds nothing.
    """

    def __init__(self, layer: nn.Linear, kind: WeightKind, sections: Sequence[Section] | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = layer.weight.shape  # a rank's part of those that the layer names
        has_bias = layer.bias is not None
        self._packed = packed_linear(kind, self.in_features, self.out_features, has_bias=has_bias, sections=sections)
        self._packed.set_weight(layer.weight.detach())
        if layer.bias is not None:
            self._packed.set_bias(layer.bias.detach())
        self._words = nn.Parameter(self._packed.words, requires_grad=False)
        self.weight = nn.Parameter(layer.weight.detach().new_empty(0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features], in the dtype of ``x``."""
        rows = x.reshape(-1, self.in_features)
        if rows.dtype not in _KINDS:
            rows = rows.float()
        return linear(rows, self._packed).view(*x.shape[:-1], self.out_features).to(x.dtype)
