"""Memory on huge pages, and memory that is had before it is used."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

import pytest
import torch

from kernels.cpu import memory
from kernels.cpu.memory import huge_zeros, populate

MIB = 2**20


def num_resident_bytes(tensor: torch.Tensor) -> int:
    """Return how much of a tensor's memory it has been given, as mincore(2) tells."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.numel() * tensor.element_size() - start
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@cache
def can_populate() -> bool:
    """Return whether this system gives memory before it is used: Linux does, from 5.14 on."""
    return populate(huge_zeros((4 * MIB,), torch.uint8))


@pytest.mark.parametrize("num_bytes", [1000, 5 * MIB])
def test_huge_zeros_are_zeros(num_bytes: int) -> None:
    zeros = huge_zeros((2, num_bytes // 2), torch.uint8)
    assert zeros.shape == (2, num_bytes // 2)
    assert not zeros.any()


needs_populate = pytest.mark.skipif(not can_populate(), reason="this system gives memory when it is used")


@needs_populate
def test_populating_gives_memory_and_keeps_the_elements() -> None:
    tensor = huge_zeros((16 * MIB,), torch.uint8)
    tensor[5] = 7
    assert num_resident_bytes(tensor) < 8 * MIB
    assert populate(tensor)
    assert num_resident_bytes(tensor) >= 16 * MIB
    assert tensor[5] == 7
    assert int(tensor.sum()) == 7


@needs_populate
def test_a_part_is_populated_alone() -> None:
    tensor = huge_zeros((8, 4 * MIB), torch.uint8)
    assert populate(tensor[2])
    assert num_resident_bytes(tensor[2]) >= 4 * MIB
    assert num_resident_bytes(tensor[4:]) == 0


def test_nothing_to_populate_and_systems_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not populate(torch.empty(0))
    monkeypatch.setattr(memory, "_ADVICE", None)
    assert not populate(torch.zeros(10))


def test_a_kernel_that_does_not_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 12345)
    tensor = torch.ones(10 * MIB)
    assert not populate(tensor)
    assert bool((tensor == 1).all())
