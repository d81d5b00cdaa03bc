"""Linear layers whose results do not depend on the batch, on a GPU: the option ``batch_invariant``.

With them a token's logits have the same bits alone and in any batch: attention, experts and sampling have this property
always where the Triton kernels compute them. A sequence that computes one token in a step, as a decode does, gets other
bits than in a chunk of several, because its context is split. On a CPU the C kernels give the same bits in every case,
and nothing is replaced.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.errors import ConfigError

__all__ = ["FixedTileLinear", "check_batch_invariant", "make_batch_invariant"]


def check_batch_invariant(device: torch.device, num_ranks: int) -> None:
    """Raise ConfigError if what computes models, where the C kernels do not, orders its sums by the batch."""
    reason = None
    if device.type == "cpu":
        reason = "needs the C kernels on a CPU, which cannot compute this model, its dtype, or on this machine"
    elif num_ranks > 1:
        reason = f"is not possible with tensor_parallel_size={num_ranks} on GPUs, whose sums depend on their size"
    if reason is not None:
        raise ConfigError(reason, param="batch_invariant", value=True, remedy="leave it out")


class FixedTileLinear(nn.Module):
    """A linear layer by a kernel with tiles of one size."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        from kernels.linear.triton import linear_triton  # only where the option is used

        return linear_triton(x, self.weight, self.bias)


def make_batch_invariant(model: nn.Module) -> None:
    """Replace the linear layers of a model that one rank computes whole."""
    for name, child in model.named_children():
        if isinstance(child, nn.Linear):
            setattr(model, name, FixedTileLinear(child))
        else:
            make_batch_invariant(child)
