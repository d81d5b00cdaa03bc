"""rounded: a number as a dtype has it. Computed once, since a captured step may not wait for a tensor's value."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["rounded"]


@cache
def rounded(number: float, dtype: torch.dtype) -> float:
    """Return the number of ``dtype`` that is nearest to ``number``."""
    return float(torch.tensor(number, dtype=dtype))
