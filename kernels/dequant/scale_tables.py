"""scale_table: the scales that bytes of a coded matrix stand for."""

from __future__ import annotations

from functools import cache

import torch

from kernels.coded_weight import StoredScales
from kernels.dequant.fp8 import e4m3_numbers
from kernels.dequant.scales import e8m0_numbers

__all__ = ["scale_table"]


@cache
def scale_table(scales: StoredScales, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale of each byte, [256]."""
    numbers = e4m3_numbers() if scales == "e4m3 halves" else e8m0_numbers()
    return (numbers if scales == "e8m0" else numbers / 2).to(dtype)
