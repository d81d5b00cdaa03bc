"""An AsyncEngine is woken when pages have come, when a deadline has passed, and when something is to be written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.async_engine import AsyncEngine
from engine.engine import Engine
from engine.kv.tiers import fetching
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.async_streams import collect, stream
from tests.engine.kv.tiers.disk_engines import PROMPT, SIZE, Gate, disk_of, make, tiers_of
from tests.engine.shadow import ShadowRunner
from tests.waiting import until_in_loop

FULL = len(PROMPT) // SIZE
REQUEST = EngineRequest("request", PROMPT, SamplingParams(temperature=0, max_tokens=3))


@asynccontextmanager
async def running(
    directory: Path, before: ShadowRunner | None = None
) -> AsyncIterator[tuple[AsyncEngine, Engine, ShadowRunner]]:
    engine, runner = make(directory, before)
    async_engine = AsyncEngine(engine)
    try:
        yield async_engine, engine, runner
    finally:
        await async_engine.shutdown()


@pytest.fixture
async def runner(tmp_path: Path) -> ShadowRunner:
    """The runner of an engine that has written the prompt to the disk while it was idle."""
    async with running(tmp_path) as (async_engine, engine, runner):
        assert await collect(stream(async_engine, REQUEST)) == runner.answer(PROMPT, 3)
        await until_in_loop(lambda: disk_of(engine).num_blocks == FULL + 1, "all blocks are written")
    return runner


async def test_a_request_that_waits_for_the_disk_wakes_the_engine(tmp_path: Path, runner: ShadowRunner) -> None:
    async with running(tmp_path, runner) as (async_engine, engine, again):
        assert await collect(stream(async_engine, REQUEST)) == again.answer(PROMPT, 3)
        assert engine.block_manager.prefix_cache.num_loaded == FULL
        await until_in_loop(lambda: not engine.block_manager.host_pool.pinned, "no page is pinned")


async def test_others_compute_while_a_request_waits_and_its_deadline_wakes_the_engine(
    tmp_path: Path, runner: ShadowRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    monkeypatch.setattr(fetching, "DEFAULT_WAIT_S", 0.1)
    async with running(tmp_path, runner) as (async_engine, engine, again):
        waiting = asyncio.create_task(collect(stream(async_engine, REQUEST)))
        await until_in_loop(lambda: tiers_of(engine).num_waiting == 1, "the request waits")
        other = EngineRequest("other", [1, 2, 3], SamplingParams(temperature=0, max_tokens=5))
        assert await collect(stream(async_engine, other)) == again.answer([1, 2, 3], 5)
        assert await waiting == again.answer(PROMPT, 3)
        assert engine.block_manager.prefix_cache.num_loaded == 0
        gate.is_open.set()


async def test_a_client_that_leaves_ends_the_wait(
    tmp_path: Path, runner: ShadowRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    async with running(tmp_path, runner) as (async_engine, engine, _):
        waiting = asyncio.create_task(collect(stream(async_engine, REQUEST)))
        await until_in_loop(lambda: tiers_of(engine).num_waiting == 1, "the request waits")
        waiting.cancel()
        await until_in_loop(lambda: tiers_of(engine).num_waiting == 0, "the request has left")
        gate.is_open.set()
        await until_in_loop(lambda: not engine.block_manager.host_pool.pinned, "no page is pinned")
