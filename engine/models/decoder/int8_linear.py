"""Int8Linear: a linear layer with int8 weights, by torch's own int8 product.

Weights are quantized symmetrically per output when they are loaded, activations per token in every step. The C kernels
compute the same (kernels/cpu/csrc/linear/linear.h); this module serves machines that cannot compile them.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.models.decoder.decoder import RowParallelLinear
from engine.models.tensor_parallel import TensorParallel

__all__ = ["Int8Linear", "quantize", "quantize_linears"]

_LARGEST = 127


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
        parallel: if given, the ranks whose outputs are summed; rank 0 adds the bias.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, parallel: TensorParallel | None = None) -> None:
        super().__init__()
        self._weight, self._scales = (nn.Parameter(one, requires_grad=False) for one in quantize(weight))
        self._bias, self._parallel = bias, parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, in_features] to [num_tokens, out_features], in the dtype of ``x``."""
        quantized, scales = quantize(x)
        product = torch._int_mm(quantized, self._weight.t()).float() * scales * self._scales.t()
        if self._bias is not None and (self._parallel is None or self._parallel.rank == 0):
            product += self._bias
        product = product.to(x.dtype)
        return product if self._parallel is None else self._parallel.all_reduce(product)


def quantize_linears(model: nn.Module) -> None:
    """Replace every linear layer of ``model`` by a quantized one."""
    for name, child in model.named_children():
        if isinstance(child, nn.Linear):
            parallel = child.parallel if isinstance(child, RowParallelLinear) else None
            setattr(model, name, Int8Linear(child.weight, child.bias, parallel))
        else:
            quantize_linears(child)
