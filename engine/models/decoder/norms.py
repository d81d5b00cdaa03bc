"""RMSNorm: the weights of a norm, and which norms of a layer exist."""

from __future__ import annotations

import torch
from torch import nn

from engine.models.config.model_config import ModelConfig

__all__ = ["RMSNorm", "norm_if"]


class RMSNorm(nn.Module):
    """The weights of an RMSNorm, which the layers' operations compute: see ``kernels.layer_ops.base.Norm``."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps, self.adds_one = config.rms_norm_eps, config.norms_add_one


def norm_if(exists: bool, config: ModelConfig, width: int) -> RMSNorm | None:
    """Return a norm of ``width`` elements, or None if the layer has none."""
    return RMSNorm(config, width) if exists else None
