"""Engines of several tensor-parallel ranks exchange whole pages, with those of as many ranks."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.kv.tiers import fetching
from tests.deployments.transport.pages.nodes import GREEDY, nodes, prompt_of
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.worker.test_tensor_parallel import ThreadRanks
from tests.waiting import HANG_S, until_in_loop


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait for pages however busy the machine is; ranks are threads."""
    monkeypatch.setattr(fetching, "LEAST_WAIT_S", HANG_S)
    monkeypatch.setattr(fetching, "DEFAULT_WAIT_S", HANG_S)
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return save_checkpoint(build_model("qwen3", num_attention_heads=8, num_key_value_heads=2), tmp_path)


async def test_two_ranks_take_the_pages_of_two_ranks(path: str) -> None:
    prompt = prompt_of(90)
    async with nodes(path, tensor_parallel_size=2, kv_transfer=True) as (source, target):
        expected = await source.answer(prompt)
        assert await target.answer(prompt, GREEDY, source.source(88)) == expected
        assert target.num_fetched == 88
        assert target.failures == {}
        await until_in_loop(lambda: source.is_clean() and target.is_clean(), "every page is free")


async def test_two_ranks_refuse_the_pages_of_one(path: str, caplog: pytest.LogCaptureFixture) -> None:
    prompt = prompt_of(90)
    sizes = ({"tensor_parallel_size": 1}, {"tensor_parallel_size": 2})
    async with nodes(path, 2, *sizes, kv_transfer=True) as (source, target):
        expected = await source.answer(prompt)
        with caplog.at_level(logging.WARNING):
            assert await target.answer(prompt, GREEDY, source.source(88)) == expected
        assert target.num_fetched == 0
        assert target.failures == {("peer", "refused"): 1}
        assert "tensor_parallel_size is '2', but '1' on this replica" in caplog.text
