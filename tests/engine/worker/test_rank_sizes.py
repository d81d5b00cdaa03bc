"""Numbers of ranks that cannot share a model are refused, with those that can."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from engine.worker.rank_sizes import require_rank_size, weight_bytes
from tests.engine.models.decoder.gemma.gemma_families import save_gemma_model

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def _require(path: str, size: int, device: torch.device = CPU) -> None:
    config = EngineConfig(model=path, tensor_parallel_size=size)
    require_rank_size(config, ModelConfig.from_hf(load_hf_config(path)), torch.float32, device)


def test_sizes_that_do_not_divide_the_model(checkpoint: Callable[[str], str]) -> None:
    path = checkpoint("qwen3")  # 8 heads
    for size in (1, 2, 4, 8):
        _require(path, size)
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size=3 does not divide the model's 8 attention heads; .* 8 "
    ):
        _require(path, 3)


def test_the_memory_of_each_size_is_named(checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint("llama")
    weights = weight_bytes(EngineConfig(model=path), torch.float32)
    assert weights is not None
    monkeypatch.setattr("engine.worker.rank_sizes._GIB", weights / 8)  # so that the weights are 8 GiB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, weights / 3))
    message = (
        r"tensor_parallel_size=2 gives each rank 4\.00 GiB of weights, and cuda:0 has 2\.67 GiB; choose one of "
        r"4 \(2\.00 GiB each\), 8 \(1\.00 GiB each\)$"
    )
    with pytest.raises(ConfigError, match=message):
        _require(path, 2, GPU)
    _require(path, 4, GPU)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, weights / 9))
    with pytest.raises(ConfigError, match="take GPUs with more memory, or a quantised checkpoint"):
        _require(path, 8, GPU)


def test_a_model_that_ranks_cannot_share_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = save_gemma_model("gemma-3n-e4b", tmp_path)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 1000))
    message = r"^tensor_parallel_size=1 gives each rank .* of weights, .*; take GPUs with more memory, or a quantised"
    with pytest.raises(ConfigError, match=message):
        _require(path, 1, GPU)
