"""CausalConv: the weights of a recurrent layer's convolution."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["CausalConv"]


class CausalConv(nn.Module):
    """A weight for each channel and each of the last tokens, as checkpoints store them, and maybe biases."""

    def __init__(self, channels: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    @property
    def taps(self) -> torch.Tensor:
        """The weights, [channels, width]."""
        return self.weight.squeeze(1)
