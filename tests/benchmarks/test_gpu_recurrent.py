"""The checks of recurrent layers for a GPU run on a CPU too; they accept what is right, and find what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.parts.engine import tokens
from benchmarks.gpu.parts.kernels import recurrent
from benchmarks.gpu.run.part import PartResults, read_results
from benchmarks.gpu.run.part_run import PartRun
from kernels.recurrent.select import select_recurrent_ops

NAMES = ("convolution", "delta rule", "row decays", "selective scan")


@pytest.fixture
def part(tmp_path: Path) -> PartRun:
    limits = {"complete": True, "faults": [], "figures": {"copy_gb_s": 10.0, "bf16_tflop_s": 0.1}}
    (tmp_path / "limits.json").write_text(json.dumps(limits))
    return PartRun("cpu", "tiny", tmp_path, PartResults(tmp_path / "part.json"))


def outcome(part: PartRun) -> tuple[dict[str, Any], list[str]]:
    part.results.finish()
    return read_results(part.work / "part.json")


def test_recurrent_operations_pass(part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "median_seconds", lambda run, device: run() is None or 1.0)
    recurrent.run(part)
    figures, faults = outcome(part)
    assert not faults
    for name in NAMES:
        assert 0 < figures[f"error, {name}, torch.bfloat16"] < 0.01
        assert figures[f"{name}, 4 x 1 tokens"]["milliseconds"] > 0
        assert figures[f"{name}, 2 x 24 tokens"]["floor_milliseconds"] > 0


class _Wrong:
    """Operations with a fault: ``spoil(output, state, metadata)`` follows each."""

    def __init__(self, spoil: Callable[..., object]) -> None:
        self._ops, self._spoil = select_recurrent_ops(torch.device("cpu")), spoil

    def __getattr__(self, name: str) -> Any:
        def compute(*arguments: Any, **options: Any) -> torch.Tensor:
            output: torch.Tensor = getattr(self._ops, name)(*arguments, **options)
            self._spoil(output, *arguments[-2:])
            return output

        return compute


FAULTS: dict[str, tuple[Callable[..., object], str]] = {
    "one output": (lambda output, *_: output[0].mul_(1.5), "torch.bfloat16: the largest error"),
    "a slot of no sequence": (lambda output, state, _: state[1:2].mul_(1.01), "states: the largest error"),
    "no snapshot": (
        lambda output, state, metadata: state.index_fill_(0, metadata.save_slots.long(), 0.0),
        "states: the largest error",
    ),
    "other bits alone": (
        lambda output, *_: output.mul_(1 + 2**-7) if len(output) < 100 else None,
        "tokens have other bits alone",
    ),
    "other bits in small steps": (
        lambda output, *_: output.mul_(1 + 2**-20) if output.dtype == torch.float32 and len(output) < 20 else None,
        "tokens have other bits",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_operation_is_found(name: str, part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, problem = FAULTS[name]
    monkeypatch.setattr(recurrent, "select_recurrent_ops", lambda *_, **__: _Wrong(spoil))
    monkeypatch.setattr(recurrent, "_measure", lambda *_: "")
    recurrent.run(part)
    faults = outcome(part)[1]
    for operation in NAMES:
        assert any(fault.startswith(operation) and problem in fault for fault in faults), faults


def test_a_replay_with_the_slots_of_its_capture_is_found(part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(run: Any, device: torch.device) -> Any:
        run()
        return lambda: None

    monkeypatch.setattr(recurrent, "captured", stale)
    monkeypatch.setattr(recurrent, "_measure", lambda *_: "")
    recurrent.run(part)
    assert len(outcome(part)[1]) == 2 * len(NAMES) * len(recurrent.TOLERANCES)  # outputs and states


@pytest.mark.long
def test_tokens_of_a_model_with_recurrent_layers(part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "FAULTS", {})
    monkeypatch.setattr(tokens, "_cases", lambda *_: {"default": {}})  # the others are those of any model
    tokens.run(part, "bfloat16", kind="recurrent")
    figures, faults = outcome(part)
    assert not faults
    assert figures["cpu, default"]["positions"] > 100
    assert figures["cpu, planted: a state of another sequence"]["above"] > 0.1
