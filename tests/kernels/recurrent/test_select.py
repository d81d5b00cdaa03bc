"""Which implementation of recurrent layers' operations is chosen."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from kernels.cpu.library import library
from kernels.recurrent.reference import ReferenceOps
from kernels.recurrent.select import select_recurrent_ops

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_cpu_has_the_c_kernels_where_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(select_recurrent_ops(CPU), ReferenceOps) == (library() is None)
    monkeypatch.setattr("kernels.cpu.library.library", lambda: None)
    assert isinstance(select_recurrent_ops(CPU), ReferenceOps)


def test_a_gpu_has_the_triton_kernels() -> None:
    pytest.importorskip("triton")
    from kernels.recurrent.triton.ops import TritonOps

    assert isinstance(select_recurrent_ops(GPU), TritonOps)


def test_a_gpu_without_triton_has_the_reference_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "kernels.recurrent.triton.ops", None)
    with caplog.at_level(logging.WARNING):
        assert isinstance(select_recurrent_ops(GPU), ReferenceOps)
    assert "Triton cannot be imported" in caplog.text


def test_another_device_has_the_reference() -> None:
    assert isinstance(select_recurrent_ops(torch.device("meta")), ReferenceOps)
