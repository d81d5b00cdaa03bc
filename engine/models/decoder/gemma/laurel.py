"""Laurel: a low-rank branch beside attention (learned augmented residual layers, Menghani et al., 2025)."""

from __future__ import annotations

import torch
from torch import nn

from engine.models.config.model_config import ModelConfig
from engine.models.decoder.norms import RMSNorm
from kernels.layer_ops.base import LayerOps

__all__ = ["LAUREL_SCALE", "Laurel"]

LAUREL_SCALE = 2.0**-0.5  # of the sum of the residual stream, attention and this branch


class Laurel(nn.Module):
    """The layer's normalized input, and two matrices' product with it, normalized."""

    def __init__(self, config: ModelConfig, rank: int, ops: LayerOps) -> None:
        super().__init__()
        self.ops = ops
        self.left = nn.Linear(config.hidden_size, rank, bias=False)
        self.right = nn.Linear(rank, config.hidden_size, bias=False)
        self.post_laurel_norm = RMSNorm(config, config.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        _, normed = self.ops.add_norm(self.right(self.left(hidden)), None, self.post_laurel_norm)
        return hidden + normed
