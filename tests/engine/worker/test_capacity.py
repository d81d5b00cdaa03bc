"""estimate_capacity says before the start what the engine has after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv.tiers.model_digest import model_digest
from engine.worker.capacity import estimate_capacity
from tests.engine.checkpoints import build_model, save_checkpoint


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"kv_cache_memory": "3MiB"}),
        ("qwen3", {"num_blocks": 7, "dtype": "bfloat16", "block_size": 32}),
        ("mistral", {"kv_cache_memory": "2MiB"}),  # all layers have a window
        ("qwen2", {"kv_cache_memory": "2MiB", "max_model_len": 512}),  # one layer has a window
    ],
)
def test_as_the_engine_measures(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = save_checkpoint(build_model(family), tmp_path)
    config = EngineConfig.from_options(path, {"device": "cpu", "skip_tokenizer_init": True, **options})
    capacity = estimate_capacity(config)
    engine = Engine.from_config(config)
    info, cache = engine.info, engine.runner.workers.local.kv_cache
    assert (capacity.num_blocks, capacity.block_size) == (info.num_blocks, info.block_size)
    assert (capacity.max_model_len, capacity.dtype) == (info.max_model_len, info.dtype)
    assert capacity.kv_bytes == cache.num_bytes
    assert capacity.num_tokens == info.num_blocks * info.block_size


def test_a_draft_model_takes_a_part_of_each_block(tmp_path: Path) -> None:
    path = save_checkpoint(build_model("qwen3"), tmp_path / "large")
    draft = save_checkpoint(build_model("qwen3", num_hidden_layers=1), tmp_path / "draft")
    speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": 4}
    options = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory": "3MiB"}
    config = EngineConfig.from_options(path, {**options, "speculative_config": speculation})
    capacity, without = estimate_capacity(config), estimate_capacity(EngineConfig.from_options(path, options))
    assert capacity.num_blocks is not None
    assert capacity.num_blocks < (without.num_blocks or 0)
    engine = Engine.from_config(config)
    assert capacity.num_blocks == engine.info.num_blocks
    assert capacity.kv_bytes == engine.runner.workers.local.kv_cache.num_bytes
    digests = {model_digest(replace(config, speculative_config=other), engine.info) for other in (None, speculation)}
    digests.add(model_digest(replace(config, speculative_config=speculation | {"model": path}), engine.info))
    assert len(digests) == 3, "pages of engines with other draft models are exchanged"


def test_transformers_modules_are_measured_at_the_start(tmp_path: Path) -> None:
    path = save_checkpoint(build_model("qwen3"), tmp_path)
    capacity = estimate_capacity(EngineConfig.from_options(path, {"model_impl": "transformers", "device": "cpu"}))
    assert (capacity.num_blocks, capacity.num_tokens, capacity.kv_bytes) == (None, None, None)
