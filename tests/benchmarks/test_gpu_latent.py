"""The check of latent attention for a GPU runs on a CPU too; it accepts what is right, and finds what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.parts.kernels import latent
from benchmarks.gpu.run.part import PartResults, read_results
from benchmarks.gpu.run.part_run import PartRun
from kernels.attention.base import AttentionInputs
from kernels.attention.cpu_backend import CpuBackend
from kernels.attention.indexer import topk_slots
from kernels.attention.indexer_inputs import IndexerInputs


@pytest.fixture
def part(tmp_path: Path) -> PartRun:
    limits = {"complete": True, "faults": [], "figures": {"copy_gb_s": 10.0, "bf16_tflop_s": 0.1}}
    (tmp_path / "limits.json").write_text(json.dumps(limits))
    return PartRun("cpu", "tiny", tmp_path, PartResults(tmp_path / "part.json"))


def outcome(part: PartRun) -> tuple[dict[str, Any], list[str]]:
    part.results.finish()
    return read_results(part.work / "part.json")


def test_latent_attention_passes(part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "median_seconds", lambda run, device: run() is None or 1.0)
    latent.run(part)
    figures, faults = outcome(part)
    assert not faults
    assert 0 < figures["error, mixed, torch.bfloat16"] < 1
    assert figures["other tokens chosen, 4 sequences, 4 tokens, torch.float32"] == 0
    for name in ("dense", "choice", "sparse"):
        assert figures[f"{name}, 4 x 32"]["floor_milliseconds"] > 0
    assert figures["sparse, 4 x 32"]["floor_milliseconds"] < figures["dense, 4 x 32"]["floor_milliseconds"]


class _Backend(CpuBackend):
    """A backend with a fault."""

    def __init__(self, spoil: Callable[[AttentionInputs, torch.Tensor], object]) -> None:
        super().__init__()
        self._spoil = spoil

    def forward(self, inputs: AttentionInputs) -> torch.Tensor:
        output = super().forward(inputs)
        self._spoil(inputs, output)
        return output


FAULTS: dict[str, tuple[Callable[[AttentionInputs, torch.Tensor], object], str]] = {
    "one head": (lambda _, output: output[0, 1].mul_(1.1), "a prefill, torch.bfloat16: "),
    "sparse attention": (
        lambda inputs, output: None if inputs.topk_slots is None else output[-1].mul_(1.1),
        "sparse, 4 sequences",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_attention_is_found(name: str, part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, problem = FAULTS[name]
    monkeypatch.setattr(latent, "select_backend", lambda *_, **__: _Backend(spoil))
    monkeypatch.setattr(latent, "_measure", lambda *_: [])
    latent.run(part)
    assert any(fault.startswith(problem) for fault in outcome(part)[1])


def test_a_wrong_choice_is_found(part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_less(inputs: IndexerInputs) -> torch.Tensor:
        slots = topk_slots(inputs)
        slots[0, -1] = slots[0, 0]
        return slots

    monkeypatch.setattr(latent, "topk_slots", one_less)
    monkeypatch.setattr(latent, "_measure", lambda *_: [])
    latent.run(part)
    assert any("of the chosen tokens are others" in fault for fault in outcome(part)[1])
