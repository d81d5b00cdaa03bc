"""The checks of experts for a GPU run on a CPU too; they accept what is right, and find what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.engines import generate, loaded
from benchmarks.gpu.parts import checkpoint
from benchmarks.gpu.parts.engine import decode, tokens
from benchmarks.gpu.parts.kernels import experts
from benchmarks.gpu.run.part import PartResults, read_results
from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.sizes import FULL
from benchmarks.gpu.timing.floors import decode_step
from benchmarks.limits.model_shape import ModelShape
from kernels.experts import experts as kernels


@pytest.fixture
def part(tmp_path: Path) -> PartRun:
    limits = {"complete": True, "faults": [], "figures": {"copy_gb_s": 10.0, "bf16_tflop_s": 0.1}}
    (tmp_path / "limits.json").write_text(json.dumps(limits))
    return PartRun("cpu", "tiny", tmp_path, PartResults(tmp_path / "part.json"))


def outcome(part: PartRun) -> tuple[dict[str, Any], list[str]]:
    part.results.finish()
    return read_results(part.work / "part.json")


def test_experts_pass(part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "TIMED", (1, 16))
    experts.run(part)
    figures, faults = outcome(part)
    assert not faults
    assert 0 < figures["error, torch.bfloat16, 300 tokens"] < 0.01
    for name in ("1 tokens", "16 tokens"):
        assert figures[name]["milliseconds"] > 0


def _another_expert(logits: torch.Tensor, top_k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = ROUTE(logits, top_k, **options)
    ids[-1, -1] = (ids[-1, -1] + 1) % logits.shape[1]
    return weights, ids


ROUTE = kernels.route


def test_one_wrong_expert_of_one_token_is_found(part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "TIMED", (1,))
    monkeypatch.setattr(kernels, "route", _another_expert)
    experts.run(part)
    assert len(outcome(part)[1]) == 2 * (len(experts.CHECKED) + 1)


def test_a_replay_that_computes_nothing_is_found(part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(run: Any, device: torch.device) -> Any:
        run()
        return lambda: None

    monkeypatch.setattr(experts, "TIMED", (1,))
    monkeypatch.setattr(experts, "captured", stale)
    experts.run(part)
    assert [fault.partition(":")[0] for fault in outcome(part)[1]] == [
        f"{dtype}, replayed for other routes" for dtype in experts.TOLERANCES
    ]


@pytest.mark.long
def test_tokens_of_a_model_with_experts(part: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "FAULTS", {})
    tokens.run(part, "bfloat16", kind="experts")
    figures, faults = outcome(part)
    assert not faults
    assert figures["cpu, default"]["positions"] > 100


def test_a_checkpoint_with_experts_is_served_and_timed(part: PartRun) -> None:
    checkpoint.run(part, "moe")
    with loaded(part, "moe") as llm:
        assert llm.engine.runner.workers.local.shard.model.config.experts.num_experts == 6  # type: ignore[attr-defined]
        assert len(generate(llm, [[11, 12]], [3])[0].outputs[0].token_ids) == 3
    decode.run(part, "moe")
    figures, faults = outcome(part)
    assert not faults
    assert figures["batch 4"]["output_tokens_per_s"] > 0


def test_the_floor_counts_the_experts_that_tokens_choose() -> None:
    shape = ModelShape(8, 2 * 4, 3, 1, 1, 8, 16, num_experts=10, experts_per_token=2)
    expert = 3 * 3 * 8 * 4
    assert shape.weights_read(1) == pytest.approx(shape.layer_parameters)
    assert shape.weights_read(2) - shape.weights_read(1) == pytest.approx(2 * 0.8 * expert)
    assert shape.weights_read(1000) - shape.weights_read(1) == pytest.approx(8 * expert)
    dense = FULL.models["0.6b"]
    assert dense.weights_read(1) == dense.weights_read(64) == dense.layer_parameters
    sparse = FULL.models["moe"]
    assert decode_step(sparse, 64, 1).num_bytes > 5 * decode_step(sparse, 1, 1).num_bytes
