"""AsyncEngine: streams, aborts, and the end of the step loop, around a shadow runner."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from engine import async_engine as async_engine_module
from engine.async_engine import AsyncEngine
from engine.engine import Engine
from engine.errors import EngineDeadError, PromptTooLongError, RequestError
from engine.output_streams import OutputStream
from engine.outputs import EngineOutput
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SchedulerOutput, StepTimes
from engine.sequence import Sequence, SequenceGroup
from tests.engine.shadow import ShadowRunner, make_engine


@pytest.fixture
async def running() -> AsyncIterator[tuple[AsyncEngine, ShadowRunner, Engine]]:
    engine, runner = make_engine(num_blocks=64, block_size=4)
    async_engine = AsyncEngine(engine)
    yield async_engine, runner, engine
    await async_engine.shutdown()


async def collect(stream: AsyncIterator[EngineOutput]) -> list[int]:
    return [token_id async for batch in stream for token_id in batch.token_ids]


async def wait_until_idle(engine: AsyncEngine) -> None:
    async with asyncio.timeout(10):
        while engine.stats().num_running or engine.stats().num_waiting or engine.stats().num_used_blocks:
            await asyncio.sleep(0.005)


async def test_concurrent_streams_each_get_their_own_tokens(running: tuple[AsyncEngine, ShadowRunner, Engine]) -> None:
    engine, runner, _ = running
    prompts = [[i, i + 1, i % 3] for i in range(40)]
    streams = [
        engine.generate(EngineRequest(str(i), prompt, SamplingParams(max_tokens=12)))
        for i, prompt in enumerate(prompts)
    ]
    answers = await asyncio.gather(*map(collect, streams))
    assert answers == [runner.answer(prompt, 12) for prompt in prompts]


async def test_the_last_batch_says_why_it_ended(running: tuple[AsyncEngine, ShadowRunner, Engine]) -> None:
    batches = [batch async for batch in running[0].generate(EngineRequest("a", [1, 2], SamplingParams(max_tokens=3)))]
    assert [batch.finish_reason for batch in batches[:-1]] == [None] * (len(batches) - 1)
    assert batches[-1].finish_reason == "length"


class Gate:
    """Holds the runner's second step, and all later ones, until it is opened."""

    def __init__(self, runner: ShadowRunner) -> None:
        self.is_held = threading.Event()
        self.opened = threading.Event()
        self.run: Callable[[SchedulerOutput, StepTimes], list[int]] = runner.run
        self._runner = runner
        runner.run = self._hold  # type: ignore[method-assign]

    def _hold(self, output: SchedulerOutput, times: StepTimes) -> list[int]:
        if self._runner.num_steps >= 1:
            self.is_held.set()
            self.opened.wait(30)
        return self.run(output, times)


async def test_a_slow_reader_gets_what_has_queued_in_one_batch() -> None:
    engine, runner = make_engine()
    gate = Gate(runner)
    async_engine = AsyncEngine(engine)
    stream = async_engine.generate(EngineRequest("a", [1, 2], SamplingParams(max_tokens=30)))
    first = await anext(stream)
    assert len(first.token_ids) == 1, "the first token comes at once"
    gate.opened.set()
    await wait_until_idle(async_engine)
    rest = [batch async for batch in stream]
    assert len(rest) == 1
    assert first.token_ids + rest[0].token_ids == runner.answer([1, 2], 30)
    await async_engine.shutdown()


async def test_the_first_batch_and_the_last_one_say_how_long_it_took() -> None:
    engine, runner = make_engine()
    gate = Gate(runner)
    async_engine = AsyncEngine(engine)
    stream = async_engine.generate(EngineRequest("a", [1, 2], SamplingParams(max_tokens=30)))
    first = await anext(stream)
    await asyncio.sleep(0.05)
    gate.opened.set()
    rest = [batch async for batch in stream]
    assert first.timing is not None
    assert rest[-1].timing is not None
    assert first.timing.queue_s >= 0
    assert first.timing.prefill_s > 0
    assert first.timing.decode_s == 0
    assert rest[-1].timing.decode_s >= 0.04  # it was held up
    assert (rest[-1].timing.queue_s, rest[-1].timing.prefill_s) == (first.timing.queue_s, first.timing.prefill_s)
    assert all(batch.timing is None for batch in rest[:-1])
    only = [batch async for batch in async_engine.generate(EngineRequest("b", [1, 2], SamplingParams(max_tokens=1)))]
    assert only[0].timing is not None
    assert only[0].timing.decode_s == 0
    await async_engine.shutdown()


async def test_an_abort_by_a_caller_reaches_the_reader_after_its_last_tokens() -> None:
    engine, runner = make_engine()
    gate = Gate(runner)
    async_engine = AsyncEngine(engine)
    stream = async_engine.generate(EngineRequest("a", [1], SamplingParams(max_tokens=100)))
    await anext(stream)
    async_engine.abort("a")
    async_engine.abort("unknown")
    gate.opened.set()
    batches = [batch async for batch in stream]
    assert (batches[-1].token_ids, batches[-1].finish_reason) == ([], "abort")
    await wait_until_idle(async_engine)
    await async_engine.shutdown()


async def test_an_id_may_be_used_again_at_once_and_gets_only_its_own_tokens() -> None:
    """The old sequence may still be in a step when its reader has gone."""
    engine, runner = make_engine()
    gate = Gate(runner)
    async_engine = AsyncEngine(engine)
    first = async_engine.generate(EngineRequest("same", [1], SamplingParams(max_tokens=50)))
    await anext(first)
    await first.aclose()  # type: ignore[attr-defined]
    second = asyncio.ensure_future(
        collect(async_engine.generate(EngineRequest("same", [9], SamplingParams(max_tokens=6))))
    )
    await asyncio.sleep(0.01)
    gate.opened.set()
    assert await second == runner.answer([9], 6)
    await async_engine.shutdown()


@pytest.mark.parametrize("noticed", [False, True])
def test_an_id_whose_loop_was_closed_is_free_and_its_old_reader_ends_no_other(noticed: bool) -> None:
    """Regression: closing the old iterator removed the new reader's stream."""
    engine, runner = make_engine()
    gate = Gate(runner)
    async_engine = AsyncEngine(engine)
    loop = asyncio.new_event_loop()
    old = async_engine.generate(EngineRequest("same", [1], SamplingParams(max_tokens=100)))
    loop.run_until_complete(anext(old))  # type: ignore[arg-type]
    loop.close()

    async def use_again() -> list[int]:
        if noticed:
            gate.opened.set()
            await wait_until_idle(async_engine)
        new = async_engine.generate(EngineRequest("same", [9], SamplingParams(max_tokens=6)))
        reader = asyncio.ensure_future(collect(new))
        await asyncio.sleep(0.01)
        await old.aclose()  # type: ignore[attr-defined]
        gate.opened.set()
        answer = await asyncio.wait_for(reader, 10)
        await wait_until_idle(async_engine)
        await async_engine.shutdown()
        return answer

    assert asyncio.run(use_again()) == runner.answer([9], 6)
    assert not len(async_engine._streams)
    assert not async_engine._streams._by_request


def test_an_abort_reaches_the_new_reader_of_an_id_whose_old_reader_has_closed() -> None:
    engine, runner = make_engine()
    gate = Gate(runner)
    async_engine = AsyncEngine(engine)
    loop = asyncio.new_event_loop()
    old = async_engine.generate(EngineRequest("same", [1], SamplingParams(max_tokens=100)))
    loop.run_until_complete(anext(old))  # type: ignore[arg-type]
    loop.close()

    async def abort_new() -> EngineOutput:
        new = async_engine.generate(EngineRequest("same", [9], SamplingParams(max_tokens=100)))
        first = asyncio.ensure_future(anext(new))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        await old.aclose()  # type: ignore[attr-defined]
        async_engine.abort("same")
        gate.opened.set()
        batches = [await first, *[batch async for batch in new]]
        await async_engine.shutdown()
        return batches[-1]

    assert asyncio.run(abort_new()).finish_reason == "abort"


async def test_an_answer_that_is_ended_while_its_tokens_are_queued_ends_after_them() -> None:
    engine, runner = make_engine()
    gate = Gate(runner)
    async_engine = AsyncEngine(engine)
    stream = async_engine.generate(EngineRequest("a", [1, 2], SamplingParams(max_tokens=100)))
    first = await anext(stream)
    await asyncio.to_thread(gate.is_held.wait, 30)
    async_engine.end_answer("a")  # in its second step
    gate.opened.set()
    await wait_until_idle(async_engine)
    await asyncio.sleep(0)  # until the end is queued too
    rest = await asyncio.wait_for(collect(stream), 5)
    assert first.token_ids + rest == runner.answer([1, 2], 2)
    await async_engine.shutdown()


async def test_a_request_that_cannot_be_queued_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make_engine()
    async_engine = AsyncEngine(engine)
    for bad in ({"priority": "x"}, {"priority": 1.5}, {"cache_salt": None}, {"cache_salt": "\ud800"}):
        with pytest.raises(RequestError, match=next(iter(bad))):
            await collect(async_engine.generate(EngineRequest("bad", [1], SamplingParams(), **bad)))  # type: ignore[arg-type]
    queue = engine.queue_request

    def trip(request: EngineRequest, **options: Any) -> object:
        if request.request_id.startswith("unlucky"):
            raise KeyError("a bug")
        return queue(request, **options)

    monkeypatch.setattr(engine, "queue_request", trip)
    with pytest.raises(RuntimeError, match="could not be queued: KeyError"):  # not the request's fault
        await collect(async_engine.generate(EngineRequest("unlucky", [1], SamplingParams())))
    assert await collect(async_engine.generate(EngineRequest("b", [1], SamplingParams(max_tokens=3)))) == runner.answer(
        [1], 3
    )
    await async_engine.shutdown()


async def test_bad_requests_are_refused_before_anything_is_queued(
    running: tuple[AsyncEngine, ShadowRunner, Engine],
) -> None:
    engine = running[0]
    with pytest.raises(PromptTooLongError):
        await collect(engine.generate(EngineRequest("a", [1] * 400, SamplingParams())))
    with pytest.raises(RequestError, match="999"):
        await collect(engine.generate(EngineRequest("a", [999], SamplingParams())))
    assert engine.stats().num_waiting == 0
    assert len(await collect(engine.generate(EngineRequest("a", [1], SamplingParams(max_tokens=2))))) == 2


async def test_a_request_id_in_use_is_refused_and_the_first_goes_on(
    running: tuple[AsyncEngine, ShadowRunner, Engine],
) -> None:
    engine, runner, _ = running
    stream = engine.generate(EngineRequest("same", [1], SamplingParams(max_tokens=20)))
    head = await anext(stream)
    with pytest.raises(RequestError, match="'same' is in use"):
        await collect(engine.generate(EngineRequest("same", [2], SamplingParams())))
    assert head.token_ids + await collect(stream) == runner.answer([1], 20)


async def test_closing_a_stream_frees_its_blocks(running: tuple[AsyncEngine, ShadowRunner, Engine]) -> None:
    engine = running[0]
    stream = engine.generate(EngineRequest("a", [1] * 8, SamplingParams(max_tokens=200)))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await wait_until_idle(engine)


class Client:
    """Sends random requests, and disconnects from, aborts or ends some of them in the middle."""

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
        params, what = self.draw_params(), self.rng.choice(["", "", "leave", "abort", "end", "cancel"])
        stream = self.engine.generate(EngineRequest(str(index), prompt, params, priority=self.rng.randint(0, 2)))
        if what == "cancel":
            task = asyncio.ensure_future(collect(stream))
            for _ in range(self.rng.randrange(20)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            answers = await self.read(str(index), stream, what, self.rng.randrange(6))
            if not what:
                self.undisturbed.append((prompt, params, answers))
        self.did[what] += 1

    async def read(
        self, request_id: str, stream: AsyncIterator[EngineOutput], what: str, when: int
    ) -> dict[int, list[int]]:
        answers: dict[int, list[int]] = {}
        position = 0
        async for batch in stream:
            answers.setdefault(batch.index, []).extend(batch.token_ids)
            if position == when and what == "abort":
                self.engine.abort(request_id)
            elif position == when and what == "end":
                self.engine.end_answer(request_id, batch.index)
            elif position == when and what == "leave":
                await stream.aclose()  # type: ignore[attr-defined]
            position += 1
        return answers


def check_answers(client: Client, runner: ShadowRunner) -> None:
    """Compare the answers with those of an undisturbed engine; other tests compare ``best_of``."""
    for prompt, params, answers in client.undisturbed:
        assert sorted(answers) == list(range(params.n))
        stops = params.stop_token_ids or ()
        limit = len(prompt) + (params.max_tokens or 0)
        if params.uses_beam_search:
            found = runner.search(prompt, params, limit)
            assert answers == {index: found[index].token_ids for index in range(params.n)}
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
    return sum(one.size for one in tracemalloc.take_snapshot().filter_traces(filters).statistics("filename"))


def num_objects_of_requests() -> int:
    gc.collect()
    kinds = {Sequence, SequenceGroup, EngineOutput, EngineOutput, OutputStream}
    return sum(type(one) in kinds for one in gc.get_objects())


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
                assert not len(async_engine._streams)
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
    assert min(client.did[what] for what in ("", "leave", "abort", "end", "cancel")) > 50
    assert runner.num_copied["swap_out"] > 50
    # 40 bytes a request would be seen. Tables that were made before the tracing are counted from their next
    # growth on, so the fullest of the first readings is what the second half is held to.
    assert min(memory[3:]) < max(memory[:3]) + 16 * 1024, memory
    assert num_objects_of_requests() <= objects_before


async def test_after_shutdown_requests_fail_clearly_and_the_thread_is_gone() -> None:
    inner, runner = make_engine()
    gate = Gate(runner)
    engine = AsyncEngine(inner)
    stream = engine.generate(EngineRequest("a", [1], SamplingParams(max_tokens=200)))
    await anext(stream)
    shutdown = asyncio.ensure_future(engine.shutdown())
    await asyncio.sleep(0.01)
    gate.opened.set()
    await shutdown
    with pytest.raises(EngineDeadError, match="shut down"):
        await collect(stream)
    with pytest.raises(EngineDeadError):
        engine.check_health()
    with pytest.raises(EngineDeadError):
        await collect(engine.generate(EngineRequest("b", [1], SamplingParams())))
    assert not any(thread.name == "engine-step-loop" for thread in threading.enumerate())


@pytest.mark.parametrize("error", [MemoryError("no more"), SystemExit("no more")])
async def test_a_failing_step_ends_every_stream_with_its_cause(error: BaseException) -> None:
    engine, runner = make_engine(max_num_seqs=4)
    gate = Gate(runner)

    def fail(output: SchedulerOutput, times: StepTimes) -> list[int]:
        raise error

    async_engine = AsyncEngine(engine)
    stream = async_engine.generate(EngineRequest("a", [1], SamplingParams(max_tokens=200)))
    await anext(stream)
    gate.run = fail
    gate.opened.set()
    with pytest.raises(EngineDeadError, match=f"{type(error).__name__}: no more"):
        await collect(stream)
    with pytest.raises(EngineDeadError):
        async_engine.check_health()
