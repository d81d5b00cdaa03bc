"""DenseAndExperts: a dense feed-forward and experts side by side, each between norms of its own (Gemma 4)."""

from __future__ import annotations

import torch
from torch import nn

from engine.models.config.model_config import ModelConfig
from engine.models.decoder.experts import SparseMoeBlock
from engine.models.decoder.norms import RMSNorm
from kernels.layer_ops.base import Addend, LayerOps

__all__ = ["DenseAndExperts"]


class DenseAndExperts(nn.Module):
    """The sum of both, of the residual stream itself: the norms before them are here, and so is the router's.

    The router's norm has the weights of the router's scale, divided by the root of ``hidden_size``.
    """

    def __init__(self, config: ModelConfig, dense: nn.Module, sparse: SparseMoeBlock, ops: LayerOps) -> None:
        super().__init__()
        self.ops, self.dense, self.sparse = ops, dense, sparse
        width = config.hidden_size
        self.dense_norm, self.dense_output_norm = RMSNorm(config, width), RMSNorm(config, width)
        self.sparse_norm, self.sparse_output_norm = RMSNorm(config, width), RMSNorm(config, width)
        self.router_norm = RMSNorm(config, width)

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        dense_input, sparse_input, router_input = (
            self.ops.add_norm(residual, None, norm)[1] for norm in (self.dense_norm, self.sparse_norm, self.router_norm)
        )
        _, dense = self.ops.add_norm(self.dense(dense_input), None, self.dense_output_norm)
        sparse = Addend(self.sparse(sparse_input, router_input), self.sparse_output_norm)
        return self.ops.add_norm(dense, sparse, None)[0]
