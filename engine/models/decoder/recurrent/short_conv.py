"""ShortConv: LFM2's gated convolution over the last tokens."""

from __future__ import annotations

import torch
from torch import nn

from engine.models.config.shapes.recurrent.short_conv import ConvShape
from engine.models.decoder.forward_context import ForwardContext
from engine.models.decoder.parallel_layers import RowParallelLinear
from engine.models.decoder.recurrent.causal_conv import CausalConv
from engine.models.tensor_parallel import TensorParallel
from kernels.recurrent.base import RecurrentOps

__all__ = ["ShortConv"]


class ShortConv(nn.Module):
    """A convolution of each channel, gated before and after.

    Args:
        shape: of a rank's share.
        hidden_size: of the residual stream.
        cache: index of the layer's state among the model's caches.
        parallel: the rank and its group.
        ops: what is computed between the projections.
    """

    def __init__(
        self, shape: ConvShape, hidden_size: int, cache: int, parallel: TensorParallel, ops: RecurrentOps
    ) -> None:
        super().__init__()
        self.cache, self.ops = cache, ops
        self.in_proj = nn.Linear(hidden_size, sum(shape.in_sections), bias=shape.has_bias)
        self.conv = CausalConv(shape.inner_size, shape.conv_width, bias=shape.has_bias)
        self.out_proj = RowParallelLinear(shape.inner_size, hidden_size, bias=shape.has_bias, parallel=parallel)

    def forward(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape, and update the states."""
        assert context.recurrent is not None
        state = context.kv_cache.layers[self.cache][0]
        before, after, values = self.in_proj(hidden).chunk(3, dim=1)
        convolved = self.ops.causal_conv(
            before * values, self.conv.taps, self.conv.bias, state, context.recurrent, silu=False
        )
        output: torch.Tensor = self.out_proj(after * convolved)
        return output
