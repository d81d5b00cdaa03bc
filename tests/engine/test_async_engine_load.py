"""AsyncEngine under a thousand mixed requests, of which many are abandoned: nothing of them is left."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from engine import async_engine as async_engine_module
from engine.async_engine import AsyncEngine
from engine.outputs import EngineOutput
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceGroup
from tests.engine.async_streams import collect, stream, wait_until_idle
from tests.engine.shadow import ShadowRunner, make_engine


class Client:
    """Sends random requests, and leaves or aborts some of them in the middle."""

    def __init__(self, engine: AsyncEngine, rng: random.Random) -> None:
        self.engine = engine
        self.rng = rng
        self.undisturbed: list[tuple[list[int], SamplingParams, dict[int, list[int]]]] = []
        self.did: Counter[str] = Counter()

    def draw_params(self) -> SamplingParams:
        common = {"max_tokens": self.rng.randint(1, 12), "stop_token_ids": self.rng.choice([[], [1, 2, 3]])}
        kind = self.rng.randrange(4)
        if kind == 0:
            return SamplingParams(temperature=0, beam_width=3, n=self.rng.randint(1, 3), **common)
        if kind == 1:
            return SamplingParams(n=2, best_of=3, **common)
        return SamplingParams(n=self.rng.choice([1, 3]) if kind == 2 else 1, **common)

    async def request(self, index: int) -> None:
        prompt = [self.rng.randrange(4) for _ in range(self.rng.randint(1, 30))]
        params, what = self.draw_params(), self.rng.choice(["", "", "leave", "abort", "cancel"])
        answer = stream(self.engine, EngineRequest(str(index), prompt, params, priority=self.rng.randint(0, 2)))
        if what == "cancel":
            task = asyncio.ensure_future(collect(answer))
            for _ in range(self.rng.randrange(20)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            answers = await self.read(str(index), answer, what, self.rng.randrange(6))
            if not what:
                self.undisturbed.append((prompt, params, answers))
        self.did[what] += 1

    async def read(
        self, request_id: str, answer: AsyncGenerator[EngineOutput, None], what: str, when: int
    ) -> dict[int, list[int]]:
        answers: dict[int, list[int]] = {}
        position = 0
        async for batch in answer:
            answers.setdefault(batch.index, []).extend(batch.token_ids)
            if position == when and what == "abort":
                self.engine.abort(request_id)
            elif position == when and what == "leave":
                await answer.aclose()
            position += 1
        return answers


def check_answers(client: Client, runner: ShadowRunner) -> None:
    """Compare the answers with those of an undisturbed engine; other tests compare ``best_of``."""
    for prompt, params, answers in client.undisturbed:
        assert sorted(answers) == list(range(params.n))
        stops = params.stop_token_ids or ()
        limit = len(prompt) + (params.max_tokens or 0)
        if params.uses_beam_search:
            hypotheses = runner.search(prompt, params, limit)
            assert answers == {index: hypotheses[index].token_ids for index in range(params.n)}
        elif params.best_of is None:
            for index, answer in answers.items():
                whole = runner.answer(prompt, limit - len(prompt), index=index)
                end = next((i + 1 for i, token_id in enumerate(whole) if token_id in stops), len(whole))
                assert answer == whole[:end]
    client.undisturbed.clear()


def memory_of_the_engine() -> int:
    """Return the bytes that the code of the engine and of asyncio has allocated, without the tests' own."""
    gc.collect()
    of_engine = Path(async_engine_module.__file__).parent / "*"
    filters = [tracemalloc.Filter(True, str(of_engine)), tracemalloc.Filter(True, f"{Path(asyncio.__file__).parent}/*")]
    return sum(
        statistic.size for statistic in tracemalloc.take_snapshot().filter_traces(filters).statistics("filename")
    )


def num_objects_of_requests() -> int:
    gc.collect()
    kinds = {Sequence, SequenceGroup}
    return sum(type(item) in kinds for item in gc.get_objects())


@pytest.mark.long
async def test_a_thousand_mixed_requests_with_random_aborts_leave_nothing_behind() -> None:
    """No block, no task, no stream, and no memory: the second five hundred take none beyond the first."""
    engine, runner = make_engine(
        num_blocks=48, num_host_blocks=24, block_size=4, max_num_batched_tokens=64, max_num_seqs=16
    )
    async_engine = AsyncEngine(engine)
    client = Client(async_engine, random.Random(0))
    objects_before = num_objects_of_requests()
    memory = []
    try:
        async with asyncio.timeout(120):
            for wave in range(20):
                if wave == 8:  # it is slow, and what counts is the second half
                    tracemalloc.start()
                await asyncio.gather(*(client.request(50 * wave + i) for i in range(50)))
                await wait_until_idle(async_engine)
                assert not engine.has_unfinished
                assert not len(async_engine._readers)
                assert engine.block_manager.num_free_blocks == 48
                assert engine.block_manager.host_pool.num_free == 24
                assert len(asyncio.all_tasks()) == 1
                check_answers(client, runner)
                if wave in (9, 10, 11, 17, 18, 19):
                    memory.append(memory_of_the_engine())
    finally:
        tracemalloc.stop()
        await async_engine.shutdown()
    # Of each kind enough; how many exactly depends on how fast the machine is.
    assert min(client.did[what] for what in ("", "leave", "abort", "cancel")) > 50
    assert runner.num_copied["block out"] > 50
    # 40 bytes a request would be seen. Tables that were made before the tracing are counted from their next
    # growth on, so the fullest of the first readings is what the second half is held to.
    assert min(memory[3:]) < max(memory[:3]) + 16 * 1024, memory
    assert num_objects_of_requests() <= objects_before
