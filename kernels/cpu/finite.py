"""Whether a tensor has no NaN and no infinity, in C (csrc/dequant/all_finite.c)."""

from __future__ import annotations

import torch

from kernels.cpu.library import library

__all__ = ["all_finite"]

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # see csrc/dequant/all_finite.h


def all_finite(x: torch.Tensor) -> bool | None:
    """Return whether ``x`` has no NaN and no infinity; None, if it is on another device, not contiguous, of another
    dtype, or there is no library.
    """
    if x.dtype not in _KINDS or x.device.type != "cpu" or not x.is_contiguous() or (loaded := library()) is None:
        return None
    return bool(loaded.pagoda_all_finite(x.data_ptr(), x.numel(), _KINDS[x.dtype]))
