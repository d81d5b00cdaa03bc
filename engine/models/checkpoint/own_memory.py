"""own_memory: mmap-backed tensors to fill with weights, returned to the OS when freed."""

from __future__ import annotations

import math
import mmap
import sys

import torch

from kernels.cpu.memory import huge_zeros

__all__ = ["own_memory"]

_SMALL, _LARGE = 64 * 2**10, 2 * 2**20  # bytes: malloc is right for less, and huge pages for more


def own_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor to fill, on the CPU.

    A matrix of an expert is small, and freed as soon as it is packed or joined with others: malloc would keep much of
    it, for each thread that reads weights.
    """
    size = math.prod(shape) * dtype.itemsize
    if not _SMALL <= size < _LARGE or sys.platform == "win32":
        return huge_zeros(shape, dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
