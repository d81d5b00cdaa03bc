"""AsyncEngine under overload: rejected requests, stuck steps, and load reports."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from engine.async_engine import AsyncEngine
from engine.engine import Engine
from engine.errors import EngineDeadError, OverloadedError
from engine.observability.load import EngineLoad
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.async_streams import Gate, collect, stream, wait_until_idle
from tests.engine.observability.clock import Clock
from tests.engine.shadow import ShadowRunner, make_engine, metrics_of
from tests.waiting import HANG_S, until_in_loop

PARAMS = SamplingParams(max_tokens=4)


class Held:
    """An AsyncEngine with one slot, whose only request is held in its second step."""

    def __init__(self, **options: object) -> None:
        self.inner, self.runner = make_engine(max_num_seqs=1, **options)  # type: ignore[arg-type]
        self.gate = Gate(self.runner)
        self.engine = AsyncEngine(self.inner)
        self.first = stream(self.engine, EngineRequest("first", [1], SamplingParams(max_tokens=3)))
        self.readers: dict[str, asyncio.Future[list[int]]] = {}

    async def arrive(self, name: str, prompt: list[int], priority: int = 0, **options: list[int]) -> None:
        """Start a reader; the step thread gets the requests in the order of these calls."""
        answer = collect(stream(self.engine, EngineRequest(name, prompt, PARAMS, priority=priority, **options)))  # type: ignore[arg-type]
        self.readers[name] = asyncio.ensure_future(answer)
        await asyncio.sleep(0)

    async def finish(self) -> dict[str, list[int] | BaseException]:
        """Let everything run to its end and return what each reader got."""
        self.gate.opened.set()
        async with asyncio.timeout(HANG_S):
            await collect(self.first)
            results = await asyncio.gather(*self.readers.values(), return_exceptions=True)
            await wait_until_idle(self.engine)
        assert not len(self.engine._readers)
        assert not self.inner._groups
        assert not metrics_of(self.inner)._times
        assert len(asyncio.all_tasks()) == 1
        await self.engine.shutdown()
        return dict(zip(self.readers, results, strict=True))


async def test_a_burst_within_one_step_fills_the_queue_and_the_rest_is_rejected_at_once() -> None:
    held = Held(max_queued_requests=3)
    await anext(held.first)
    for i in range(1000):
        await held.arrive(str(i), [i % 50])
    results = await held.finish()
    answers = {name: result for name, result in results.items() if isinstance(result, list)}
    assert answers == {str(i): held.runner.answer([i], 4) for i in range(3)}
    rejected = [result for result in results.values() if isinstance(result, OverloadedError)]
    assert len(rejected) == 997
    assert len(set(map(id, rejected))) == 997, "two readers share an error, and so its traceback"


async def test_a_request_that_is_rejected_to_make_room_fails_and_disturbs_no_other() -> None:
    held = Held(max_queued_requests=2)
    await anext(held.first)
    await held.arrive("low", [2], -1)
    await held.arrive("resumed", [3], -5, output_token_ids=[7])
    await held.arrive("high", [4], 1)
    await held.arrive("peer", [5], 1)
    results = await held.finish()
    assert isinstance(results["low"], OverloadedError)
    assert isinstance(results["peer"], OverloadedError)
    assert results["high"] == held.runner.answer([4], 4)
    assert results["resumed"] == held.runner.answer([3, 7], 3)


async def test_a_request_that_leaves_the_queue_makes_room_in_it() -> None:
    held = Held(max_queued_requests=1)
    await anext(held.first)
    await held.arrive("leaves", [2])
    await held.arrive("aborted", [2])
    held.readers["leaves"].cancel()
    await asyncio.wait([held.readers["leaves"]])
    await held.arrive("stays", [3])
    results = await held.finish()
    assert isinstance(results["leaves"], asyncio.CancelledError)
    assert isinstance(results["aborted"], OverloadedError)
    assert results["stays"] == held.runner.answer([3], 4)


async def test_a_queue_that_is_full_by_tokens_rejects_in_the_same_way() -> None:
    held = Held(max_queued_prefill_tokens=40, block_size=4)
    await anext(held.first)
    await held.arrive("a", [2] * 30)
    await held.arrive("b", [3] * 30)
    results = await held.finish()
    assert results["a"] == held.runner.answer([2] * 30, 4)
    assert "max_queued_prefill_tokens=40" in str(results["b"])


async def test_a_step_that_does_not_end_fails_the_health_check_until_it_does() -> None:
    inner, runner = make_engine(step_timeout_s=60)
    gate, clock = Gate(runner), Clock()
    engine = AsyncEngine(inner, clock=clock)
    clock.now += 1000
    engine.check_health()  # idle for long, and healthy
    answer = stream(engine, EngineRequest("a", [1], SamplingParams(max_tokens=5)))
    head = await anext(answer)
    await until_in_loop(gate.is_held.is_set, "the second step has begun")
    clock.now += 59
    engine.check_health()
    clock.now += 3
    with pytest.raises(EngineDeadError, match=r"running for 6\d s, and step_timeout_s=60; restart it"):
        engine.check_health()
    with pytest.raises(EngineDeadError, match="running for"):
        await collect(stream(engine, EngineRequest("b", [1], PARAMS)))
    gate.opened.set()
    assert head.token_ids + await collect(answer) == runner.answer([1], 5)
    engine.check_health()
    assert await collect(stream(engine, EngineRequest("b", [2], PARAMS))) == runner.answer([2], 4)
    await engine.shutdown()


async def test_a_command_that_does_not_end_is_noticed_too() -> None:
    inner, _ = make_engine()
    clock, entered, opened = Clock(), threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert opened.wait(HANG_S)

    engine = AsyncEngine(inner, clock=clock)
    engine.call_in_step_thread(wait)
    await until_in_loop(entered.is_set, "the command runs")
    clock.now += 301
    with pytest.raises(EngineDeadError, match="running for 301 s"):
        engine.check_health()
    opened.set()
    await until_in_loop(lambda: engine._busy_since is None, "the command has ended")
    engine.check_health()
    await engine.shutdown()


class Listener:
    """Records the load reports of an engine."""

    def __init__(self) -> None:
        self.reports: list[EngineLoad] = []
        self.threads: set[str] = set()

    def __call__(self, load: EngineLoad) -> None:
        self.reports.append(load)
        self.threads.add(threading.current_thread().name)


@pytest.fixture
async def listening() -> AsyncIterator[tuple[AsyncEngine, ShadowRunner, Engine, Listener, Clock]]:
    inner, runner = make_engine(max_num_seqs=2)
    listener, clock = Listener(), Clock()
    engine = AsyncEngine(inner, listener, clock=clock)
    yield engine, runner, inner, listener, clock
    await engine.shutdown()


async def test_arrivals_and_the_return_to_idleness_are_reported(
    listening: tuple[AsyncEngine, ShadowRunner, Engine, Listener, Clock],
) -> None:
    engine, runner, inner, listener, clock = listening
    gate = Gate(runner)
    answer = stream(engine, EngineRequest("a", [1] * 9, SamplingParams(max_tokens=30)))
    await anext(answer)
    await until_in_loop(gate.is_held.is_set, "the second step has begun")
    others = [asyncio.ensure_future(collect(stream(engine, EngineRequest(str(i), [i], PARAMS)))) for i in range(3)]
    await asyncio.sleep(0)  # they are submitted
    clock.now += 1  # the next report is due, whose queue has all three
    gate.opened.set()
    await asyncio.gather(*others, collect(answer))
    clock.now += 1
    await until_in_loop(lambda: listener.reports[-1] == inner.meter.load() == engine.load(), "idleness is reported")
    last = listener.reports[-1]
    assert (last.num_running, last.num_waiting, last.queued_prefill_tokens) == (0, 0, 0)
    assert last == engine.load()
    assert last.num_steps > 0
    assert max(load.num_waiting for load in listener.reports) == 3
    assert listener.threads == {"engine-step-loop"}


async def test_a_listener_that_raises_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    inner, runner = make_engine()

    def fail(load: EngineLoad) -> None:
        raise KeyError("a bug")

    engine = AsyncEngine(inner, fail)
    assert await collect(stream(engine, EngineRequest("a", [1], PARAMS))) == runner.answer([1], 4)
    await wait_until_idle(engine)
    assert "the engine's load could not be reported" in caplog.text
    await engine.shutdown()
