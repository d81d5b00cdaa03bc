"""The linear layers of transformers' modules, multiplied by the C kernels.

They take most of a step on a CPU. The kernels also give a row the same bits in every batch, which torch's products do
not.
"""

from __future__ import annotations

import torch
from torch import nn

from kernels.cpu.library import library
from kernels.cpu.linear import PackedLinear, WeightKind, linear

__all__ = ["CpuLinear", "pack_linears"]

_KINDS = {torch.float32: WeightKind.FLOAT32, torch.bfloat16: WeightKind.BFLOAT16}


class CpuLinear(nn.Module):
    """A linear layer on packed weights.

    Args:
        layer: whose weights are packed, float32 or bfloat16, on the CPU.

    Attributes:
        weight: its dtype and device, which some modules ask for; it holds nothing.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._packed = PackedLinear(
            _KINDS[layer.weight.dtype], self.in_features, self.out_features, has_bias=layer.bias is not None
        )
        self._packed.set_weight(layer.weight.detach())
        if layer.bias is not None:
            self._packed.set_bias(layer.bias.detach())
        self.weight = nn.Parameter(layer.weight.detach().new_empty(0), requires_grad=False)

    @property
    def num_bytes(self) -> int:
        """Bytes that the weights take."""
        return self._packed.num_bytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features], in the dtype of ``x``."""
        rows = x.reshape(-1, self.in_features)
        if rows.dtype not in _KINDS:
            rows = rows.float()
        return linear(rows, self._packed).view(*x.shape[:-1], self.out_features).to(x.dtype)


def pack_linears(model: nn.Module) -> None:
    """Replace the linear layers of ``model`` that the C kernels can compute, if this machine can compile them.

    Classes derived from ``nn.Linear`` stay: they compute something else.
    """
    if library() is None:
        return
    for name, child in model.named_children():
        if type(child) is not nn.Linear:
            pack_linears(child)
        elif child.weight.dtype in _KINDS and child.weight.device.type == "cpu":
            setattr(model, name, CpuLinear(child))
