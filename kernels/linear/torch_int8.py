"""Linear layers with int8 weights, by torch's own int8 product, for machines that cannot compile the C kernels.

Weights are quantized symmetrically per output when they are loaded, activations per token in every step. The C kernels
compute the same (kernels/cpu/csrc/linear/linear.h).
"""

from __future__ import annotations

import torch
from torch import nn

from kernels.linear.base import LinearMethod

__all__ = ["Int8Linear", "TorchInt8Linears", "quantize"]

_LARGEST = 127


class TorchInt8Linears(LinearMethod):
    """Quantizes each weight to int8."""

    name = "torch_int8"

    def layer(self, linear: nn.Linear) -> nn.Module:
        """Return a layer with the weights of ``linear``, quantized."""
        return Int8Linear(linear.weight, linear.bias)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [n, width] and float32 scales [n, 1] whose product is nearly ``x`` [n, width]."""
    x = x.float()
    largest = x.abs().amax(dim=1, keepdim=True)
    inverse = torch.where(largest > 0, _LARGEST / largest, 0)
    return (x * inverse).round().to(torch.int8), largest / _LARGEST


class Int8Linear(nn.Module):
    """A linear layer on quantized weights.

    Args:
        weight: [out_features, in_features], not yet quantized.
        bias: [out_features], or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._weight, self._scales = (nn.Parameter(part, requires_grad=False) for part in quantize(weight))
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, in_features] to [num_tokens, out_features], in the dtype of ``x``."""
        quantized, scales = quantize(x)
        product = torch._int_mm(quantized, self._weight.t()).float() * scales * self._scales.t()
        if self._bias is not None:
            product += self._bias
        return product.to(x.dtype)
