"""Copies between the host and a device, on a CPU."""

from __future__ import annotations

import numpy as np
import torch

from kernels.device_copy import start_to_host, to_device, to_device_together, wait_for_device

CPU = torch.device("cpu")


def test_on_a_cpu_nothing_is_copied() -> None:
    array = np.arange(3, dtype=np.int32)
    tensor = to_device(array, None, CPU)
    array[0] = 7
    assert tensor.tolist() == [7, 1, 2]
    assert start_to_host(tensor) is tensor
    wait_for_device(CPU)


def test_lists_become_tensors_of_the_given_dtype() -> None:
    tensor = to_device([[0.5], [2.0]], torch.float32, CPU)
    assert tensor.dtype is torch.float32
    assert tensor.tolist() == [[0.5], [2.0]]
    assert to_device([], torch.int64, CPU).shape == (0,)


def test_arrays_that_go_together_share_their_memory_on_a_cpu() -> None:
    arrays = [np.arange(3, dtype=np.int64), np.array([5], dtype=np.int32), np.empty(0, dtype=np.int64)]
    tensors = to_device_together(arrays, CPU)
    arrays[0][0] = 7
    assert [tensor.tolist() for tensor in tensors] == [[7, 1, 2], [5], []]
    assert [tensor.dtype for tensor in tensors] == [torch.int64, torch.int32, torch.int64]
