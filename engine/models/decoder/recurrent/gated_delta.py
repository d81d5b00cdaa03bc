"""GatedDeltaNet: the recurrent layers of Qwen3-Next, Qwen3.5 and OLMo Hybrid."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from engine.models.config.shapes.recurrent.gated_delta import GatedDeltaShape
from engine.models.decoder.forward_context import ForwardContext
from engine.models.decoder.parallel_layers import RowParallelLinear
from engine.models.decoder.recurrent.causal_conv import CausalConv
from engine.models.decoder.recurrent.gated_norm import GatedNorm
from engine.models.tensor_parallel import TensorParallel
from kernels.recurrent.base import RecurrentOps

__all__ = ["GatedDeltaNet"]


class GatedDeltaNet(nn.Module):
    """A convolution of queries, keys and values, the gated delta rule, and a gated norm of each head.

    Args:
        shape: of a rank's share.
        hidden_size: of the residual stream.
        cache: index of the layer's state among the model's caches.
        parallel: the rank and its group.
        ops: what is computed between the projections.
    """

    def __init__(
        self, shape: GatedDeltaShape, hidden_size: int, cache: int, parallel: TensorParallel, ops: RecurrentOps
    ) -> None:
        super().__init__()
        self.shape, self.cache, self.ops = shape, cache, ops
        self.in_proj = nn.Linear(hidden_size, sum(shape.in_sections), bias=False)
        self.conv = CausalConv(sum(shape.conv_sections), shape.conv_width, bias=False)
        self.A_log = nn.Parameter(torch.empty(shape.num_heads))  # float32, as is the next one
        self.dt_bias = nn.Parameter(torch.empty(shape.num_heads))
        self.gated_norm = GatedNorm(shape.value_dim, shape.value_dim, shape.norm_eps, gates_first=False)
        self.out_proj = RowParallelLinear(shape.inner_size, hidden_size, bias=False, parallel=parallel)

    def forward(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape, and update the states."""
        assert context.recurrent is not None
        shape, metadata = self.shape, context.recurrent
        conv_state, state = context.kv_cache.layers[self.cache]
        widths = [sum(shape.conv_sections), shape.inner_size, shape.num_heads, shape.num_heads]
        qkv, gate, beta, step = torch.split(self.in_proj(hidden), widths, dim=1)
        qkv = self.ops.causal_conv(qkv, self.conv.taps, None, conv_state, metadata, silu=True)
        query, key, value = torch.split(qkv, list(shape.conv_sections), dim=1)
        mixed = self.ops.gated_delta_rule(
            query.reshape(-1, shape.num_key_heads, shape.key_dim),
            key.reshape(-1, shape.num_key_heads, shape.key_dim),
            value.reshape(-1, shape.num_heads, shape.value_dim),
            -self.A_log.exp() * F.softplus(step.float() + self.dt_bias),
            shape.largest_beta * beta.float().sigmoid(),
            state,
            metadata,
        )
        output: torch.Tensor = self.out_proj(self.gated_norm(mixed.flatten(1), gate))
        return output
