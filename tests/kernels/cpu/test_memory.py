"""Memory on huge pages."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest
import torch

from kernels.cpu.memory import huge_zeros

MIB = 2**20


def num_resident_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes of a tensor's memory are allocated, as mincore(2) reports."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.numel() * tensor.element_size() - start
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.mark.parametrize("num_bytes", [1000, 5 * MIB])
def test_huge_zeros_are_zeros(num_bytes: int) -> None:
    zeros = huge_zeros((2, num_bytes // 2), torch.uint8)
    assert zeros.shape == (2, num_bytes // 2)
    assert not zeros.any()


@pytest.mark.skipif(sys.platform != "linux", reason="mincore is Linux's")
def test_untouched_memory_is_not_allocated() -> None:
    tensor = huge_zeros((16 * MIB,), torch.uint8)
    assert num_resident_bytes(tensor) == 0
    tensor[5] = 7
    assert 0 < num_resident_bytes(tensor) <= 2 * MIB
