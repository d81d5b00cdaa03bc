"""Mamba: the recurrent layers of Granite 4, Bamba, Falcon-H1, Nemotron-H and Mamba 2."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from engine.models.config.shapes.recurrent.mamba import MambaShape
from engine.models.decoder.forward_context import ForwardContext
from engine.models.decoder.parallel_layers import RowParallelLinear
from engine.models.decoder.recurrent.causal_conv import CausalConv
from engine.models.decoder.recurrent.gated_norm import GatedNorm
from engine.models.tensor_parallel import TensorParallel
from kernels.recurrent.base import RecurrentOps

__all__ = ["Mamba"]


class Mamba(nn.Module):
    """A Mamba 2 layer: a convolution, a selective state space, and a gate, maybe with a norm.

    Args:
        shape: of a rank's share.
        hidden_size: of the residual stream.
        eps: of the norm.
        cache: index of the layer's state among the model's caches.
        parallel: the rank and its group.
        ops: what is computed between the projections.
    """

    def __init__(
        self, shape: MambaShape, hidden_size: int, eps: float, cache: int, parallel: TensorParallel, ops: RecurrentOps
    ) -> None:
        super().__init__()
        self.shape, self.cache, self.ops = shape, cache, ops
        inner = shape.inner_size
        self.in_proj = nn.Linear(hidden_size, sum(shape.in_sections), bias=shape.in_bias)
        self.conv = CausalConv(sum(shape.conv_sections), shape.conv_width, bias=shape.conv_bias)
        self.A_log = nn.Parameter(torch.empty(shape.num_heads))  # float32, as are the next two
        self.dt_bias = nn.Parameter(torch.empty(shape.num_heads))
        self.D = nn.Parameter(torch.empty(shape.num_heads))
        gates_first = shape.norm == "after_gate"
        norm = GatedNorm(inner, inner // shape.num_groups, eps, gates_first=gates_first)
        self.gated_norm = None if shape.norm == "none" else norm
        self.out_proj = RowParallelLinear(inner, hidden_size, bias=shape.out_bias, parallel=parallel)

    def forward(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape, and update the states."""
        assert context.recurrent is not None
        shape, metadata = self.shape, context.recurrent
        conv_state, state = context.kv_cache.layers[self.cache]
        widths = [shape.inner_size, sum(shape.conv_sections), shape.num_heads]
        gate, inputs, steps = torch.split(self.in_proj(hidden), widths, dim=1)
        inputs = self.ops.causal_conv(inputs, self.conv.taps, self.conv.bias, conv_state, metadata, silu=True)
        values, keys, queries = torch.split(inputs, list(shape.conv_sections), dim=1)
        mixed = self.ops.selective_scan(
            values.reshape(-1, shape.num_heads, shape.head_dim),
            F.softplus(steps.float() + self.dt_bias).clamp(*shape.step_limits),
            -self.A_log.exp(),
            keys.reshape(-1, shape.num_groups, shape.state_size),
            queries.reshape(-1, shape.num_groups, shape.state_size),
            self.D,
            state,
            metadata,
        )
        mixed = mixed.flatten(1)
        gated = mixed * F.silu(gate) if self.gated_norm is None else self.gated_norm(mixed, gate)
        output: torch.Tensor = self.out_proj(gated)
        return output
