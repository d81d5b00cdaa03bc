"""What tests of AsyncEngine share: a reader on an event loop, holding a step, and waiting for the end of all work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from engine.async_engine import AsyncEngine
from engine.outputs import EngineOutput, FinishReason
from engine.request import EngineRequest
from engine.scheduling.scheduler_output import SchedulerOutput, StepTimes
from tests.engine.shadow import ShadowRunner
from tests.waiting import HANG_S, until_in_loop


class LoopReader:
    """An OutputReader of one request: a queue on the event loop that creates it."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[EngineOutput | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def publish(self, tags: list[None], token_ids: list[int], others: list[tuple[None, EngineOutput]]) -> None:
        assert len(tags) == len(token_ids)
        for token_id in token_ids:
            self._put(EngineOutput("", 0, [token_id]))
        for _, output in others:
            self._put(output)

    def fail(self, tag: None, error: Exception) -> None:
        self._put(error)

    def end(self, tag: None) -> None:
        self._put(EngineOutput("", 0, [], FinishReason.ABORT, is_last=True))

    def _put(self, arrived: EngineOutput | Exception) -> None:
        self._loop.call_soon_threadsafe(self.arrived.put_nowait, arrived)


async def stream(engine: AsyncEngine, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
    """Run a request and yield its outputs, as the replica's server does; closing the iterator aborts the request."""
    engine.check_request(request)
    grammar = await engine.compile_grammar(request)
    engine.check_health()
    reader, is_done = LoopReader(), False
    engine.submit(request, reader, None, grammar)
    try:
        while not is_done:
            arrived = await reader.arrived.get()
            if isinstance(arrived, Exception):
                is_done = True
                raise arrived
            is_done = arrived.is_last
            yield arrived
    finally:
        if not is_done:
            engine.abort(request.request_id)


async def collect(stream: AsyncIterator[EngineOutput]) -> list[int]:
    """Return the token ids of a stream that is read to its end."""
    return [token_id async for batch in stream for token_id in batch.token_ids]


async def wait_until_idle(engine: AsyncEngine) -> None:
    """Wait until no request is running or waiting, and all blocks are free."""

    def is_idle() -> bool:
        stats = engine.stats()
        return not (stats.num_running or stats.num_waiting or stats.num_used_blocks)

    await until_in_loop(is_idle, "the engine is idle", details=engine.stats)


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
            assert self.opened.wait(HANG_S), "the gate stays closed"
        return self.run(output, times)
