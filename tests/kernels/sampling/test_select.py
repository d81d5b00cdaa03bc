"""Which implementation a device gets."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest

from kernels.sampling.select import select_sampling_ops


@pytest.fixture(autouse=True)
def nothing_selected_before() -> Iterator[None]:
    select_sampling_ops.cache_clear()
    yield
    select_sampling_ops.cache_clear()


def test_a_gpu_takes_triton_and_a_cpu_does_not() -> None:
    pytest.importorskip("triton")
    from kernels.sampling.triton.ops import TritonSampling

    assert isinstance(select_sampling_ops("cuda"), TritonSampling)
    assert select_sampling_ops("cpu") is None


def test_a_gpu_without_triton_takes_torch_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "kernels.sampling.triton.ops", None)  # importing it fails
    with caplog.at_level(logging.WARNING):
        assert select_sampling_ops("cuda") is None
    assert "Triton cannot be imported" in caplog.text
