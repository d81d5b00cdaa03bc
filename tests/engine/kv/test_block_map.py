"""The block map against the counts of the block pool."""

from __future__ import annotations

import asyncio
import pickle
import random
import threading
from functools import partial

import pytest

from engine.async_engine import AsyncEngine
from engine.engine import Engine
from engine.kv import block_map
from engine.kv.block_map import BlockMap, cell_size, cells_by_slice
from engine.kv.block_pool import Block, BlockCounts
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput, StepTimes
from tests.engine.async_streams import stream
from tests.engine.random_load import RandomLoad
from tests.engine.random_requests import random_arrival
from tests.engine.shadow import make_engine
from tests.waiting import HANG_S


def picture(blocks: list[Block], max_cells: int) -> BlockMap:
    size = cell_size(len(blocks), max_cells)
    return BlockMap(len(blocks), size, b"".join(cells_by_slice(blocks, size)))


def cells(block_map: BlockMap) -> list[tuple[int, ...]]:
    return [tuple(block_map.cells[first : first + 3]) for first in range(0, len(block_map.cells), 3)]


@pytest.mark.parametrize(("num_blocks", "max_cells", "size"), [(8, 8, 1), (8, 4, 2), (9, 4, 3), (1, 1024, 1)])
def test_as_many_blocks_to_a_cell_as_it_takes(num_blocks: int, max_cells: int, size: int) -> None:
    assert cell_size(num_blocks, max_cells) == size
    assert -(-num_blocks // size) <= max_cells


def test_each_state_is_counted_in_its_own_cell() -> None:
    blocks = [Block(number) for number in range(7)]
    blocks[1].block_hash = 5
    blocks[2].ref_count = 1
    blocks[3].ref_count, blocks[3].block_hash = 1, 6  # used, though it could be hit
    blocks[4].ref_count = 2
    blocks[6].ref_count = 1000
    assert cells(picture(blocks, 7)) == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0), (0, 0, 1)]
    assert cells(picture(blocks, 3)) == [(1, 1, 0), (0, 1, 1), (0, 0, 1)]
    assert picture(blocks, 3).counts() == BlockCounts(free=2, cached=1, used=4, shared=2)


def test_a_cell_never_counts_further_than_a_byte() -> None:
    blocks = [Block(number, ref_count=1) for number in range(1000)]
    block_map = picture(blocks, 1)
    assert block_map.blocks_per_cell == 255
    assert cells(block_map) == [(0, 255, 0), (0, 255, 0), (0, 255, 0), (0, 235, 0)]


def test_a_big_pool_is_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [Block(number, ref_count=number % 3) for number in range(100_000)]
    size = cell_size(len(blocks), 1024)
    parts = list(cells_by_slice(blocks, size))
    assert len(parts) == 25
    assert max(map(len, parts)) // 3 * size <= 4096
    whole = BlockMap(len(blocks), size, b"".join(parts))
    assert whole.counts() == BlockCounts(free=33_334, cached=0, used=66_666, shared=33_333)
    assert len(pickle.dumps(whole)) < 4096
    monkeypatch.setattr(block_map, "_SLICE", 10**6)
    assert b"".join(cells_by_slice(blocks, size)) == whole.cells


@pytest.mark.parametrize("seed", range(3))
def test_it_agrees_with_the_block_pool_under_random_load(seed: int) -> None:
    rng = random.Random(seed)
    load = RandomLoad(num_blocks=40, block_size=4, max_num_seqs=8)
    manager, seen = load.engine.block_manager, set()
    for _ in range(150):
        if len(load.requests) < 8:
            load.add(random_arrival(rng))
        if load.requests:
            load.step()
        counts = manager.pool.counts()
        for max_cells in (7, 40):
            assert picture(manager.pool.blocks, max_cells).counts() == counts
        seen.update(state for state in ("free", "cached", "used", "shared") if getattr(counts, state))
    load.finish()
    assert seen == {"free", "cached", "used", "shared"}


def _map_of(engine: Engine) -> BlockMap:
    return picture(engine.block_manager.pool.blocks, 1024)


async def test_it_is_drawn_while_the_engine_runs() -> None:
    engine, runner = make_engine(num_blocks=64, block_size=4)
    compute, may_step = runner.run, threading.Semaphore(1)

    def run(output: SchedulerOutput, times: StepTimes) -> SampledTokens:
        assert may_step.acquire(timeout=HANG_S)
        return compute(output, times)

    runner.run = run  # type: ignore[method-assign]
    running = AsyncEngine(engine)
    try:
        assert (await running.block_map()).counts() == BlockCounts(64, 0, 0, 0)
        seen = []
        async for _ in stream(running, EngineRequest("a", [1] * 40, SamplingParams(max_tokens=100))):
            may_step.release()  # the next step runs while the picture is drawn
            seen.append(await running.block_map(max_cells=16))
        assert all(block_map.blocks_per_cell == 4 for block_map in seen)
        assert any(block_map.counts().used >= 10 for block_map in seen)
        reset = asyncio.Event()
        running.call_in_step_thread(engine.reset_prefix_cache)
        running.call_in_step_thread(partial(asyncio.get_running_loop().call_soon_threadsafe, reset.set))
        await reset.wait()  # after everything that the step thread had to do
        assert (await running.block_map()).counts() == _map_of(engine).counts() == engine.block_manager.pool.counts()
    finally:
        await running.shutdown()
