"""Which implementation a device gets."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from kernels.layer_ops.select import select_layer_ops
from kernels.layer_ops.torch import TorchOps

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_gpu_takes_triton_and_a_cpu_does_not_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from kernels.layer_ops.triton.ops import TritonOps

    assert isinstance(select_layer_ops(GPU), TritonOps)
    monkeypatch.setitem(sys.modules, "kernels.layer_ops.triton.ops", None)
    assert isinstance(select_layer_ops(CPU), TorchOps)


def test_a_gpu_without_triton_takes_torch_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "kernels.layer_ops.triton.ops", None)  # importing it fails
    with caplog.at_level(logging.WARNING):
        assert isinstance(select_layer_ops(GPU), TorchOps)
    assert "Triton cannot be imported" in caplog.text
