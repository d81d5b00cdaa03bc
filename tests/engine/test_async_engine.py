"""AsyncEngine: streams, aborts, and the end of the step loop, around a shadow runner."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.engine import Engine
from engine.errors import EngineDeadError, PromptTooLongError, RequestError
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput, StepTimes
from tests.engine.async_streams import Gate, collect, stream, wait_until_idle
from tests.engine.observability.clock import Clock
from tests.engine.shadow import ShadowRunner, make_engine
from tests.waiting import until_in_loop


@pytest.fixture
async def running() -> AsyncIterator[tuple[AsyncEngine, ShadowRunner, Engine]]:
    engine, runner = make_engine(num_blocks=64, block_size=4)
    async_engine = AsyncEngine(engine)
    yield async_engine, runner, engine
    await async_engine.shutdown()


async def test_concurrent_streams_each_get_their_own_tokens(running: tuple[AsyncEngine, ShadowRunner, Engine]) -> None:
    engine, runner, _ = running
    prompts = [[i, i + 1, i % 3] for i in range(40)]
    streams = [
        stream(engine, EngineRequest(str(i), prompt, SamplingParams(max_tokens=12))) for i, prompt in enumerate(prompts)
    ]
    answers = await asyncio.gather(*map(collect, streams))
    assert answers == [runner.answer(prompt, 12) for prompt in prompts]


async def test_the_last_batch_says_why_it_ended(running: tuple[AsyncEngine, ShadowRunner, Engine]) -> None:
    batches = [batch async for batch in stream(running[0], EngineRequest("a", [1, 2], SamplingParams(max_tokens=3)))]
    assert [batch.finish_reason for batch in batches[:-1]] == [None] * (len(batches) - 1)
    assert batches[-1].finish_reason == "length"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of requests' times."""
    clock = Clock()
    monkeypatch.setattr("engine.async_engine.monotonic", clock)
    monkeypatch.setattr("engine.observability.engine_metrics.monotonic", clock)
    return clock


async def test_the_first_batch_and_the_last_one_say_how_long_it_took(clock: Clock) -> None:
    engine, runner = make_engine()
    compute = runner.run

    def run(output: SchedulerOutput, times: StepTimes) -> SampledTokens:
        clock.now += 2.0
        return compute(output, times)

    runner.run = run  # type: ignore[method-assign]
    gate = Gate(runner)
    async_engine = AsyncEngine(engine)
    answer = stream(async_engine, EngineRequest("a", [1, 2], SamplingParams(max_tokens=30)))
    first = await anext(answer)
    await until_in_loop(gate.is_held.is_set, "the second step has begun")
    clock.now += 5.0
    gate.opened.set()
    rest = [batch async for batch in answer]
    assert first.timing is not None
    assert rest[-1].timing is not None
    assert (first.timing.queue_s, first.timing.prefill_s, first.timing.decode_s) == (0.0, 2.0, 0.0)
    assert rest[-1].timing.decode_s == 29 * 2.0 + 5.0
    assert (rest[-1].timing.queue_s, rest[-1].timing.prefill_s) == (first.timing.queue_s, first.timing.prefill_s)
    assert all(batch.timing is None for batch in rest[:-1])
    only = [batch async for batch in stream(async_engine, EngineRequest("b", [1, 2], SamplingParams(max_tokens=1)))]
    assert only[0].timing is not None
    assert only[0].timing.decode_s == 0
    await async_engine.shutdown()


async def test_the_wait_for_the_end_of_a_step_counts_as_queueing(clock: Clock) -> None:
    engine, runner = make_engine()
    gate = Gate(runner)
    async_engine = AsyncEngine(engine)
    first = stream(async_engine, EngineRequest("a", [1, 2], SamplingParams(max_tokens=30)))
    await anext(first)
    await until_in_loop(gate.is_held.is_set, "a step that the second request is too late for")
    second = asyncio.create_task(anext(stream(async_engine, EngineRequest("b", [1, 3], SamplingParams(max_tokens=1)))))
    await asyncio.sleep(0)  # it is submitted
    clock.now += 3.0
    gate.opened.set()
    timing = (await second).timing
    assert timing is not None
    assert timing.queue_s == 3.0
    await first.aclose()
    await async_engine.shutdown()


async def test_an_abort_by_a_caller_reaches_the_reader_after_its_last_tokens() -> None:
    engine, runner = make_engine()
    gate = Gate(runner)
    async_engine = AsyncEngine(engine)
    answer = stream(async_engine, EngineRequest("a", [1], SamplingParams(max_tokens=100)))
    await anext(answer)
    async_engine.abort("a")
    async_engine.abort("unknown")
    gate.opened.set()
    batches = [batch async for batch in answer]
    assert (batches[-1].token_ids, batches[-1].finish_reason) == ([], "abort")
    await wait_until_idle(async_engine)
    await async_engine.shutdown()


async def test_a_request_that_cannot_be_queued_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make_engine()
    async_engine = AsyncEngine(engine)
    for bad in ({"priority": "x"}, {"priority": 1.5}, {"cache_salt": None}, {"cache_salt": "\ud800"}):
        with pytest.raises(RequestError, match=next(iter(bad))):
            await collect(stream(async_engine, EngineRequest("bad", [1], SamplingParams(), **bad)))  # type: ignore[arg-type]
    queue = engine.queue_request

    def trip(request: EngineRequest, **options: Any) -> object:
        if request.request_id.startswith("unlucky"):
            raise KeyError("a bug")
        return queue(request, **options)

    monkeypatch.setattr(engine, "queue_request", trip)
    with pytest.raises(RuntimeError, match="could not be queued: KeyError"):  # not the request's fault
        await collect(stream(async_engine, EngineRequest("unlucky", [1], SamplingParams())))
    assert await collect(stream(async_engine, EngineRequest("b", [1], SamplingParams(max_tokens=3)))) == runner.answer(
        [1], 3
    )
    await async_engine.shutdown()


async def test_bad_requests_are_refused_before_anything_is_queued(
    running: tuple[AsyncEngine, ShadowRunner, Engine],
) -> None:
    engine = running[0]
    with pytest.raises(PromptTooLongError):
        await collect(stream(engine, EngineRequest("a", [1] * 400, SamplingParams())))
    with pytest.raises(RequestError, match="999"):
        await collect(stream(engine, EngineRequest("a", [999], SamplingParams())))
    assert engine.stats().num_waiting == 0
    assert len(await collect(stream(engine, EngineRequest("a", [1], SamplingParams(max_tokens=2))))) == 2


async def test_closing_a_stream_frees_its_blocks(running: tuple[AsyncEngine, ShadowRunner, Engine]) -> None:
    engine = running[0]
    answer = stream(engine, EngineRequest("a", [1] * 8, SamplingParams(max_tokens=200)))
    await anext(answer)
    await answer.aclose()
    await wait_until_idle(engine)


async def test_after_shutdown_requests_fail_clearly_and_the_thread_is_gone() -> None:
    inner, runner = make_engine()
    gate = Gate(runner)
    engine = AsyncEngine(inner)
    answer = stream(engine, EngineRequest("a", [1], SamplingParams(max_tokens=200)))
    await anext(answer)
    shutdown = asyncio.ensure_future(engine.shutdown())
    await asyncio.sleep(0)  # the step thread has the command
    gate.opened.set()
    await shutdown
    with pytest.raises(EngineDeadError, match="shut down"):
        await collect(answer)
    with pytest.raises(EngineDeadError):
        engine.check_health()
    with pytest.raises(EngineDeadError):
        await collect(stream(engine, EngineRequest("b", [1], SamplingParams())))
    assert not any(thread.name == "engine-step-loop" for thread in threading.enumerate())


@pytest.mark.parametrize("error", [MemoryError("no more"), SystemExit("no more")])
async def test_a_failing_step_ends_every_stream_with_its_cause(error: BaseException) -> None:
    engine, runner = make_engine(max_num_seqs=4)
    gate = Gate(runner)

    def fail(output: SchedulerOutput, times: StepTimes) -> list[int]:
        raise error

    async_engine = AsyncEngine(engine)
    answer = stream(async_engine, EngineRequest("a", [1], SamplingParams(max_tokens=200)))
    await anext(answer)
    gate.run = fail
    gate.opened.set()
    with pytest.raises(EngineDeadError, match=f"{type(error).__name__}: no more"):
        await collect(answer)
    with pytest.raises(EngineDeadError):
        async_engine.check_health()
