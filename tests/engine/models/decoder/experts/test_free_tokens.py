"""How many tokens a step computes in the time of one, of a model whose tokens each need other experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.models.config.files.hf_config import load_hf_config
from engine.models.decoder import cpu_decoder
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.decoder.loader import load_decoder
from engine.models.tensor_parallel import TensorParallel
from kernels.cpu.experts import PackedExperts
from kernels.cpu.library import library
from tests.engine.checkpoints import build_model, save_checkpoint

TOKENS = 32  # of the larger measurement
HEAD_S, TOKEN_S = 1.0, 0.25  # what reading the head takes, and the experts of each different token


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> set[PackedExperts]:
    """The experts that were measured, on a clock that only computing moves."""
    now, seen = 0.0, set()

    def logits(*_: object) -> None:
        nonlocal now
        now += HEAD_S

    def experts(hidden: torch.Tensor, packed: PackedExperts, *_: object) -> None:
        nonlocal now
        seen.add(packed)
        now += TOKEN_S * len(torch.unique(hidden, dim=0))

    monkeypatch.setattr(cpu_decoder, "perf_counter", lambda: now)
    monkeypatch.setattr(cpu_decoder, "logits", logits)
    monkeypatch.setattr(cpu_decoder, "experts", experts)
    return seen


def load(path: Path, family: str, **overrides: object) -> CpuDecoder:
    if library() is None:
        pytest.skip("no C compiler is installed")
    checkpoint = save_checkpoint(build_model(family, **overrides), path)
    model = load_decoder(
        checkpoint,
        load_hf_config(checkpoint),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=64,
        parallel=TensorParallel(),
    )
    assert isinstance(model, CpuDecoder)
    return model


@pytest.mark.parametrize("num_layers", [3, 7])
def test_each_token_takes_the_time_to_read_its_experts(
    num_layers: int, measured: set[PackedExperts], tmp_path: Path
) -> None:
    model = load(tmp_path, "qwen3_moe", num_hidden_layers=num_layers)  # layer 1 is dense
    sparse = [layer.experts for layer in model.layers if layer.experts is not None]
    assert len(sparse) == num_layers - 1
    dense_s = HEAD_S * (model.num_bytes - sum(layer.num_bytes for layer in sparse)) / model.lm_head.num_bytes
    few, many = (dense_s + TOKEN_S * tokens * len(sparse) for tokens in (1, TOKENS))
    assert model.free_tokens == max(1, round(TOKENS * few / many)) < TOKENS / 2
    assert measured == set(sparse[:4])


def test_without_experts_the_head_alone_is_measured(measured: set[PackedExperts], tmp_path: Path) -> None:
    assert load(tmp_path, "qwen3").free_tokens == TOKENS
    assert measured == set()
