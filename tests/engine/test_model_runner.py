"""The model runner: what a step's plan makes of the KV cache."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.metrics import StepTimes
from engine.model_runner import ModelRunner
from engine.step import SchedulerOutput
from tests.engine.conftest import SavedModel


def test_a_step_without_tokens_still_copies_its_blocks(qwen3: SavedModel) -> None:
    """A request that gives way when nothing else runs is swapped out by a step that computes nothing."""
    runner = ModelRunner(
        EngineConfig(model=qwen3.path, device="cpu", dtype="float32", num_blocks=8, block_size=4, swap_space_gib=0.001)
    )
    cache = runner.workers.local.kv_cache
    for key, value in cache.layers:
        key.normal_()
        value.normal_()
    before = cache.gather([2], which="key")
    assert runner.run(SchedulerOutput(swap_out=[(2, 1)]), StepTimes()).token_ids == []
    assert runner.run(SchedulerOutput(swap_in=[(1, 5)], block_copies=[(5, 6)]), StepTimes()).token_ids == []
    assert torch.equal(cache.gather([6], which="key"), before)
