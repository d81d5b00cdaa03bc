"""KimiDeltaAttention: the recurrent layers of Kimi Linear."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from engine.models.config.shapes.recurrent.kimi_delta import KimiDeltaShape
from engine.models.decoder.forward_context import ForwardContext
from engine.models.decoder.parallel_layers import RowParallelLinear
from engine.models.decoder.recurrent.causal_conv import CausalConv
from engine.models.decoder.recurrent.gated_norm import GatedNorm
from engine.models.tensor_parallel import TensorParallel
from kernels.recurrent.base import RecurrentOps

__all__ = ["KimiDeltaAttention"]


class KimiDeltaAttention(nn.Module):
    """A convolution, the gated delta rule with a decay of each element of a key, and a gated norm of each head.

    Args:
        shape: of a rank's share.
        hidden_size: of the residual stream.
        cache: index of the layer's state among the model's caches.
        parallel: the rank and its group.
        ops: what is computed between the projections.
    """

    def __init__(
        self, shape: KimiDeltaShape, hidden_size: int, cache: int, parallel: TensorParallel, ops: RecurrentOps
    ) -> None:
        super().__init__()
        self.shape, self.cache, self.ops = shape, cache, ops
        inner, head_dim = shape.inner_size, shape.head_dim
        self.in_proj = nn.Linear(hidden_size, sum(shape.in_sections), bias=False)
        self.conv = CausalConv(sum(shape.conv_sections), shape.conv_width, bias=False)
        self.f_b_proj = nn.Linear(head_dim, inner, bias=False)  # of the decays
        self.g_b_proj = nn.Linear(head_dim, inner, bias=False)  # of the gates
        self.A_log = nn.Parameter(torch.empty(shape.num_heads))  # float32, as is the next one
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.gated_norm = GatedNorm(head_dim, head_dim, shape.norm_eps, gates_first=False, activation="sigmoid")
        self.out_proj = RowParallelLinear(inner, hidden_size, bias=False, parallel=parallel)

    def forward(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape, and update the states."""
        assert context.recurrent is not None
        shape, metadata = self.shape, context.recurrent
        conv_state, state = context.kv_cache.layers[self.cache]
        widths = [sum(shape.conv_sections), shape.num_heads, shape.head_dim, shape.head_dim]
        qkv, beta, of_decays, of_gates = torch.split(self.in_proj(hidden), widths, dim=1)
        qkv = self.ops.causal_conv(qkv, self.conv.taps, None, conv_state, metadata, silu=True)
        by_head = (len(hidden), shape.num_heads, shape.head_dim)
        query, key, value = (part.reshape(by_head) for part in qkv.chunk(3, dim=1))
        steps = F.softplus(self.f_b_proj(of_decays).float() + self.dt_bias).view(by_head)
        mixed = self.ops.gated_delta_rule(
            query, key, value, -self.A_log.exp()[:, None] * steps, beta.float().sigmoid(), state, metadata
        )
        output: torch.Tensor = self.out_proj(self.gated_norm(mixed.flatten(1), self.g_b_proj(of_gates)))
        return output
