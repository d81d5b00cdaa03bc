"""Checks of benchmarks/gpu on the simulated GPU: they run, and launch every kernel of attention and changed logits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu.inputs.attention_cases import Case
from benchmarks.gpu.parts.kernels import attention, sampling, store_kvcache
from benchmarks.gpu.sizes import FULL
from benchmarks.gpu.timing.floors import Limits
from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.kernels.attention.paged_batches import BATCHES

KERNELS = {"prefill_kernel", "plan_splits_kernel", "split_decode_kernel", "reduce_splits_kernel"}


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
    monkeypatch.setattr(attention, "worst_error", lambda *_: 0.0)
    attention.serving_shapes(part)
    assert not part.faults
    assert set(gpu.launches.counts) == KERNELS


def test_the_check_launches_every_kernel(gpu: Rehearsal, part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_serving_shapes(gpu, part, monkeypatch)


def test_contexts_too_short_to_split_again(gpu: Rehearsal, part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that a review found: batches of short contexts do not run every kernel."""
    short = [Case(name, lengths) for name, lengths in BATCHES.items() if max(length for _, length in lengths) < 200]
    monkeypatch.setattr(attention, "serving_cases", lambda context: short)
    with pytest.raises(AssertionError, match="reduce_splits_kernel"):
        check_serving_shapes(gpu, part, monkeypatch)


def test_odd_shapes_and_the_cache_write(gpu: Rehearsal, part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "ODD_DTYPES", (torch.bfloat16,))
    attention.odd_shapes(part)
    store_kvcache.run(part)
    assert not part.faults
    assert set(gpu.launches.counts) == {*KERNELS, "_store_kernel"}


def test_the_changes_of_logits(part: Any, gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their arguments keep to the kernels' contracts, which compute what the reference does."""
    monkeypatch.setattr(sampling, "captured", lambda launch, device: launch)
    monkeypatch.setattr(sampling, "median_seconds", lambda launch, device: launch() or 1.0)
    part.limits = Limits(copy_gb_s=1.0, bf16_tflop_s=1.0)
    from kernels.sampling.triton.ops import TritonSampling

    lines: list[str] = []
    batches = {batch: sampling._logits(torch.device("cpu"), batch, 1000, 1.5) for batch in sampling.BATCHES}
    on_device = {batch: logits.to(part.device) for batch, logits in batches.items()}
    sampling._check_changes(part, TritonSampling(), on_device, lines)
    assert len(lines) == 5 * len(sampling.BATCHES)
    assert not part.faults
    assert {"change_tokens_kernel", "penalise_kernel", "bitmask_kernel"} <= set(gpu.launches.counts)
