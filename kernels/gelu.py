"""Gelu: the activation of encoders, in C on a CPU (csrc/layer/gelu.c)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from kernels.cpu.library import library

__all__ = ["Gelu"]

_DTYPES = (torch.float32, torch.bfloat16)


class Gelu(nn.Module):
    """x times the normal distribution's share below x: torch's ``gelu``, to 2e-7 times the larger of 1 and |x|.

    Torch computes it where there are no C kernels.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return gelu(x), elementwise."""
        if x.device.type != "cpu" or x.dtype not in _DTYPES or (loaded := library()) is None:
            return F.gelu(x)
        x = x.contiguous()
        output, width = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // width if width else 0
        loaded.pagoda_gelu(output.data_ptr(), x.data_ptr(), x.dtype == torch.bfloat16, rows, width)
        return output
