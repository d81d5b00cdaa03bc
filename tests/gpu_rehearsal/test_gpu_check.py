"""The attention check of benchmarks/gpu on the simulated GPU: it runs, and it launches every kernel."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu.attention_cases import Case
from benchmarks.gpu.parts import attention, store_kvcache
from benchmarks.gpu.sizes import FULL
from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.kernels.attention.paged_batches import BATCHES

KERNELS = {"mixed_kernel", "split_decode_kernel", "reduce_splits_kernel"}


@pytest.fixture
def part(gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A part of the check, on ``cuda:0``, with contexts and heads that a CPU can fill."""
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device=None: generator())  # that of a GPU asks the driver
    faults: list[str] = []
    sizes = replace(FULL, context=8192, attention=((16, 8, 16),))
    device = torch.device("cuda", 0)
    return SimpleNamespace(
        device=device, on_gpu=True, sizes=sizes, faults=faults, fault=faults.append, record=lambda *_: None
    )


def check_serving_shapes(gpu: Rehearsal, part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch the kernels for all batches; neither they nor the reference compute anything."""
    gpu.launches.computes = False
    monkeypatch.setattr(attention, "chunked_reference", lambda inputs: torch.zeros_like(inputs.query))
    attention.serving_shapes(part)
    assert not part.faults
    assert set(gpu.launches.counts) == KERNELS
    assert gpu.launches.arguments["split_decode_kernel.NUM_SPLITS"] >= {2, 4, 16, 32}


def test_the_check_launches_every_kernel(gpu: Rehearsal, part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_serving_shapes(gpu, part, monkeypatch)


def test_contexts_too_short_to_split_again(gpu: Rehearsal, part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that a review found: with 132 multiprocessors these batches run one of the three kernels."""
    short = [Case(name, lengths) for name, lengths in BATCHES.items() if lengths]
    monkeypatch.setattr(attention, "serving_cases", lambda context: short)
    with pytest.raises(AssertionError, match="split_decode_kernel"):
        check_serving_shapes(gpu, part, monkeypatch)


def test_odd_shapes_and_the_cache_write(gpu: Rehearsal, part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "ODD_DTYPES", (torch.bfloat16,))
    attention.odd_shapes(part)
    store_kvcache.run(part)
    assert not part.faults
    assert set(gpu.launches.counts) == {*KERNELS, "_store_kernel"}
