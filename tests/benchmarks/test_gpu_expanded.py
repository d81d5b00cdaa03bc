"""The comparison of absorbed and expanded latents for a GPU runs on a CPU too, and finds what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.parts.kernels import expanded
from benchmarks.gpu.run.part import PartResults, read_results
from benchmarks.gpu.run.part_run import PartRun
from kernels.attention import reference
from kernels.attention.base import AttentionInputs
from kernels.attention.cpu_backend import CpuBackend


class _Backend(CpuBackend):
    """Computes expanded latents, with a part of the keys forgotten or not."""

    expands_latents = True

    def __init__(self, *, forgets_rope: bool) -> None:
        super().__init__()
        self._forgets_rope = forgets_rope

    def forward(self, inputs: AttentionInputs) -> torch.Tensor:
        if inputs.rope_cache is None:
            return super().forward(inputs)
        if self._forgets_rope:
            inputs = replace(inputs, rope_cache=torch.zeros_like(inputs.rope_cache))
        return reference.attention(inputs)


@pytest.fixture
def part(tmp_path: Path) -> PartRun:
    limits = {"complete": True, "faults": [], "figures": {"copy_gb_s": 10.0, "bf16_tflop_s": 0.1}}
    (tmp_path / "limits.json").write_text(json.dumps(limits))
    return PartRun("cpu", "tiny", tmp_path, PartResults(tmp_path / "part.json"))


@pytest.mark.parametrize("forgets_rope", [False, True])
def test_a_fault_is_found(part: PartRun, forgets_rope: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded, "select_backend", lambda *_, **__: _Backend(forgets_rope=forgets_rope))
    monkeypatch.setattr(expanded, "median_seconds", lambda run, device: run() is None or 1.0)
    expanded.run(part)
    part.results.finish()
    figures, faults = read_results(part.work / "part.json")
    assert bool(faults) == forgets_rope
    times = [figures[f"{name}, 3 heads, 40 of 60"]["floor_milliseconds"] for name in ("expanded", "absorbed")]
    assert 0 < times[0] < times[1]


def test_a_cpu_expands_nothing(part: PartRun) -> None:
    expanded.run(part)
    part.results.finish()
    assert read_results(part.work / "part.json") == ({"backend": "cpu"}, [])
