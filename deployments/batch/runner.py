"""BatchRunner: runs the batches of a directory while this ingress holds the lease, the oldest ones first."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from deployments.batch.batch_run import BatchRun, Workplace
from deployments.batch.batch_store import State
from deployments.batch.journal import JournalLostError
from deployments.batch.lease import BEAT_S, Lease
from deployments.observability.ingress_metrics import BATCHES, ingress_recorder

__all__ = ["BatchRunner"]

logger = logging.getLogger("ray.serve")

MAX_AT_ONCE = 4  # batches; they take turns line by line
SWEEP_S = 3600.0
RETRY_S = 5.0  # after a failure to read or write
T = TypeVar("T")


class BatchRunner:
    """Runs batches.

    Args:
        work: what every run needs.
        lease: of the directory.
        observe: called about once a second while batches run.
    """

    def __init__(self, work: Workplace, lease: Lease, observe: Callable[[], Awaitable[None]]) -> None:
        self._work = work
        self._lease = lease
        self._observe = observe
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._retry_at: dict[str, float] = {}
        self._swept_at = -SWEEP_S
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._has_failed = False
        # Of its own: the lease must beat while the runs read and write.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="batch-lease")

    def start(self) -> None:
        """Start, on the event loop of this process."""
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Look for batches at once."""
        self._woken.set()

    async def close(self) -> None:
        """Leave the batches to another ingress."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._stop_runs()
        await self._in_thread(self._lease.release)
        self._executor.shutdown(wait=False)

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
                self._has_failed = False
            except OSError as error:
                if not self._has_failed:
                    logger.error("the directory of batches cannot be used: %s", error)
                self._has_failed = True
            except Exception:
                logger.exception("batches cannot be run")
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._woken.wait()
            except TimeoutError:
                pass
            self._woken.clear()

    async def _look(self) -> None:
        """Keep or take the lease, and start and stop what must be."""
        if not await self._in_thread(self._lease.poll):
            await self._stop_runs()
            self._report(0, 0)
            return
        states = await self._in_thread(self._work.batches.unfinished)
        for state in states:
            self._see(state)
        self._report(len(self._runs), len(states) - len(self._runs))
        if self._runs:
            self._work.slots.wake()
            await self._observe()
        if time.monotonic() >= self._swept_at + SWEEP_S:
            self._swept_at = time.monotonic()
            await self._in_thread(self._sweep)

    def _see(self, state: State) -> None:
        """Start or stop the run of a batch."""
        batch = state.batch
        early = "cancelled" if state.cancelling_at is not None else None
        if early is None and batch.expires_at <= self._work.clock():
            early = "expired"
        if batch.id in self._runs:
            if early is not None:
                self._runs[batch.id][0].stop(early)
            return
        if early is None and len(self._runs) >= MAX_AT_ONCE:
            return
        if time.monotonic() < self._retry_at.get(batch.id, 0.0) or self._lease.number is None:
            return
        run = BatchRun(self._work, state, self._lease.number)
        if early is not None:
            run.stop(early)
        task = asyncio.create_task(self._end(batch.id, run))
        self._runs[batch.id] = run, task

    async def _end(self, batch_id: str, run: BatchRun) -> None:
        try:
            await run.run()
            self._retry_at.pop(batch_id, None)
        except (OSError, JournalLostError) as error:
            logger.error("batch %s is interrupted and will be continued: %s", batch_id, error)
            self._retry_at[batch_id] = time.monotonic() + RETRY_S
        except Exception:
            logger.exception("batch %s is interrupted and will be continued", batch_id)
            self._retry_at[batch_id] = time.monotonic() + RETRY_S
        finally:
            self._runs.pop(batch_id, None)
            self.wake()

    async def _stop_runs(self) -> None:
        """Interrupt all runs: another ingress continues them."""
        tasks = [task for _, task in self._runs.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _sweep(self) -> None:
        self._work.files.sweep()
        self._work.batches.sweep()

    def _report(self, num_running: int, num_queued: int) -> None:
        ingress_recorder().set(BATCHES, num_running, state="running")
        ingress_recorder().set(BATCHES, num_queued, state="queued")

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)
