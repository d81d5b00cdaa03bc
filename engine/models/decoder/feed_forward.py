"""feed_forward: a layer's feed-forward, dense or of experts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from engine.models.config.model_config import ModelConfig
from engine.models.decoder.dense_and_experts import DenseAndExperts
from engine.models.decoder.experts import SparseMoeBlock
from engine.models.decoder.parallel_layers import RowParallelLinear
from engine.models.tensor_parallel import TensorParallel
from kernels.layer_ops.base import LayerOps

__all__ = ["MLP", "UngatedMLP", "feed_forward"]


class MLP(nn.Module):
    """Gated feed-forward: SwiGLU, or GeGLU with the approximation by tanh.

    Args:
        config: of the layer.
        parallel: this rank and its group.
        ops: the layers' operations.
        gate_cutoff: see ``ModelConfig.gate_cutoffs``; None: all gates count.
    """

    def __init__(
        self, config: ModelConfig, parallel: TensorParallel, ops: LayerOps, gate_cutoff: float | None = None
    ) -> None:
        super().__init__()
        self.gate_cutoff = gate_cutoff
        self.ops, self.activation = ops, config.activation
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, bias=config.mlp_bias, parallel=parallel
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        gate_up = self.gate_up_proj(hidden)
        if self.gate_cutoff is not None:
            _drop_small_gates(gate_up, self.gate_cutoff)
        output: torch.Tensor = self.down_proj(self.ops.gated_activation(gate_up, self.activation))
        return output


def _drop_small_gates(gate_up: torch.Tensor, deviations: float) -> None:
    """Subtract from each gate the cut-off of its token, or make it zero if it is below that.

    Args:
        gate_up: [num_tokens, 2 * width], whose first half are the gates; is changed.
        deviations: the cut-off, in standard deviations above the mean.
    """
    gates = gate_up[:, : gate_up.shape[1] // 2]
    deviation, mean = torch.std_mean(gates.float(), dim=1, correction=0, keepdim=True)
    gates.copy_(torch.relu(gates - (mean + deviations * deviation)))


class UngatedMLP(nn.Module):
    """Feed-forward without a gate, whose activation squares what a ReLU leaves (So et al., 2021)."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, ops: LayerOps) -> None:
        super().__init__()
        del ops  # two launches of torch's suffice
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, bias=config.mlp_bias, parallel=parallel
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        output: torch.Tensor = self.down_proj(torch.relu(self.up_proj(hidden)).square())
        return output


def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel, ops: LayerOps) -> nn.Module:
    """Return a layer's feed-forward: dense, experts, or both."""
    dense = MLP if config.has_feed_forward_gate else UngatedMLP
    experts, own = config.experts, replace(config, intermediate_size=config.intermediate_size_of(layer))
    if (cutoff := config.gate_cutoffs.get(layer)) is not None:
        return MLP(own, parallel, ops, cutoff)
    if experts is None or not config.has_experts(layer):
        return dense(own, parallel, ops)
    if experts.is_beside_dense:
        sparse = SparseMoeBlock(experts, config.hidden_size, parallel, None)
        return DenseAndExperts(config, dense(own, parallel, ops), sparse, ops)
    inner = experts.shared_intermediate_size
    alone = TensorParallel()  # the block sums over the ranks, once
    shared = dense(replace(config, intermediate_size=inner, mlp_bias=False), alone, ops) if inner else None
    return SparseMoeBlock(experts, config.hidden_size, parallel, shared)
