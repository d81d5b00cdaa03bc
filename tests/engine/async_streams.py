"""What tests of AsyncEngine share: reading a stream, holding a step, and waiting for the end of all work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

from engine.async_engine import AsyncEngine
from engine.outputs import EngineOutput
from engine.scheduling.scheduler_output import SchedulerOutput, StepTimes
from tests.engine.shadow import ShadowRunner


async def collect(stream: AsyncIterator[EngineOutput]) -> list[int]:
    """Return the token ids of a stream that is read to its end."""
    return [token_id async for batch in stream for token_id in batch.token_ids]


async def wait_until_idle(engine: AsyncEngine) -> None:
    """Wait until no request is running or waiting, and all blocks are free."""
    async with asyncio.timeout(10):
        while engine.stats().num_running or engine.stats().num_waiting or engine.stats().num_used_blocks:
            await asyncio.sleep(0.005)


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
