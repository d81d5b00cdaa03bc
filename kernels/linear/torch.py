"""Linear layers as torch computes them."""

from __future__ import annotations

from torch import nn

from kernels.linear.base import LinearMethod

__all__ = ["TorchLinears"]


class TorchLinears(LinearMethod):
    """Keeps `nn.Linear` as it is."""

    name = "torch"

    def layer(self, linear: nn.Linear) -> nn.Module:
        """Return ``linear`` itself."""
        return linear
