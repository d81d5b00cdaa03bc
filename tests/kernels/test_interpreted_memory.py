"""Accesses beyond a launch's tensors are found in the interpreter, in every test of this folder that runs a kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _copy_kernel(source, target, count, first, BLOCK: tl.constexpr):  # noqa: N803
    index = tl.arange(0, BLOCK)
    tl.store(target + index, tl.load(source + first + index, mask=index < count), mask=index < count)


@triton.jit
def _store_kernel(target, place):
    tl.store(target + place, 1)


@triton.jit
def _add_kernel(target, place):
    tl.atomic_add(target + place, 1)


@pytest.fixture(autouse=True)
def _interpreted(kernel_device: torch.device) -> None:
    if kernel_device.type != "cpu":
        pytest.skip("only the interpreter shows addresses")


def test_masked_elements_may_be_anywhere() -> None:
    source, target = torch.arange(10), torch.zeros(10, dtype=torch.int64)
    _copy_kernel[1,](source, target, 10, 0, BLOCK=16)
    assert torch.equal(source, target)


@pytest.mark.parametrize(("count", "first"), [(11, 0), (10, 1), (1, 10), (1, -1)])
def test_a_load_beyond_a_tensor(count: int, first: int) -> None:
    source, target = torch.zeros(100, dtype=torch.int64)[40:50], torch.zeros(16, dtype=torch.int64)
    with pytest.raises(InterpreterError, match="1 elements of 8 bytes are beyond all tensors"):
        _copy_kernel[1,](source, target, count, first, BLOCK=16)


@pytest.mark.parametrize("kernel", [_store_kernel, _add_kernel])
def test_a_store_beyond_a_tensor(kernel: triton.JITFunction) -> None:
    memory = torch.zeros(100, dtype=torch.int32)
    kernel[1,](memory[:10], 9)
    with pytest.raises(InterpreterError, match="1 elements of 4 bytes are beyond all tensors"):
        kernel[1,](memory[:10], 10)
    assert memory.tolist() == [0] * 9 + [1] + [0] * 90


def test_a_tensor_with_gaps_ends_with_its_last_element() -> None:
    memory, target = torch.zeros(100, dtype=torch.int64), torch.zeros(16, dtype=torch.int64)
    columns = memory.view(10, 10)[:, :3]  # ends at 93
    _copy_kernel[1,](columns, target, 3, 90, BLOCK=4)
    with pytest.raises(InterpreterError, match="beyond all tensors"):
        _copy_kernel[1,](columns, target, 4, 90, BLOCK=4)
