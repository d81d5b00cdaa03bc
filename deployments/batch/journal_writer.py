"""JournalWriter: appends the results of many tasks to a journal, as many as have come in one write."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from typing import Protocol

from deployments.batch.journal import Record

__all__ = ["JournalWriter"]


class Results(Protocol):
    """What results are appended to: the journal of a batch, or the file of a run without a server."""

    def append(self, records: list[Record]) -> None:
        """Make results durable, or raise OSError."""

    def close(self) -> None:
        """Close the file."""


class JournalWriter:
    """Appends in a thread, one write at a time.

    Args:
        journal: of a batch.
        executor: has the thread.
    """

    def __init__(self, journal: Results, executor: Executor) -> None:
        self._journal = journal
        self._executor = executor
        self._pending: list[tuple[Record, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None
        self._error: Exception | None = None

    async def append(self, record: Record) -> None:
        """Return when a result is durable.

        Raises:
            OSError: it is not, and nothing after it will be.
        """
        if self._error is not None:
            raise self._error
        done = asyncio.get_running_loop().create_future()
        self._pending.append((record, done))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())
        await done

    async def settle(self) -> None:
        """Wait for the writes in progress: those of cancelled tasks have no one else who waits for them."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Wait for the writes in progress, and close the journal."""
        await self.settle()
        await asyncio.get_running_loop().run_in_executor(self._executor, self._journal.close)

    async def _write(self) -> None:
        while self._pending:
            batch, self._pending = self._pending, []
            records = [record for record, _ in batch]
            try:
                if self._error is None:
                    await asyncio.get_running_loop().run_in_executor(self._executor, self._journal.append, records)
            except OSError as error:
                self._error = error
            for _, done in batch:
                if done.done():  # its task was cancelled
                    continue
                if self._error is None:
                    done.set_result(None)
                else:
                    done.set_exception(self._error)
