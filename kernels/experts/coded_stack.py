"""CodedStack: one matrix of each of a layer's experts as codes, for the Triton kernel of triton/coded_experts.py."""

from __future__ import annotations

import torch
from torch import nn

from kernels.coded_weight import CodedWeight
from kernels.linear.coded_sections import FACTORS, CodedLayout, CodedSection

__all__ = ["CodedStack"]


class CodedStack(nn.Module):
    """Coded matrices of one format, each packed as a CodedSection: its tensors have the expert as the first dimension.

    Args:
        first: a packed matrix, as all will be; its numbers are not taken.
        num_experts: how many there are.
        batch_invariant: give a row the same bits in any batch, of any size.

    Attributes:
        layout: how they are packed.
        out_features: of an expert.
        codes: uint8 [num_experts, num_blocks, out_features, width], undefined until they are set, as are all tensors.
    """

    codes: torch.Tensor
    outer_scales: torch.Tensor
    outer_minima: torch.Tensor | None
    zero_points: torch.Tensor | None
    inner_scales: torch.Tensor | None
    inner_minima: torch.Tensor | None
    output_scales: torch.Tensor | None

    def __init__(self, first: CodedSection, num_experts: int, *, batch_invariant: bool = False) -> None:
        super().__init__()
        self.layout: CodedLayout = first.layout
        self.out_features, self.num_experts, self.batch_invariant = first.out_features, num_experts, batch_invariant
        for name in ("codes", "output_scales", *FACTORS):
            part = getattr(first, name)
            stacked = None if part is None else nn.Parameter(part.new_empty(num_experts, *part.shape), False)
            self.register_parameter(name, stacked)

    def set_expert(self, expert: int, section: CodedSection) -> None:
        """Copy one expert's packed matrix."""
        assert section.layout == self.layout
        for name, stack in self.named_parameters():
            stack[expert] = getattr(section, name)

    @staticmethod
    def section(weight: CodedWeight, out_features: int, device: torch.device) -> CodedSection:
        """Return an expert's matrix, which has one format and its inputs in order, packed on a device."""
        (matrix,) = weight.sections
        assert matrix.input_order is None
        return CodedSection(matrix, out_features, device)
