"""BatchRun: one batch, from its claim to its end.

    input lines -> those without a result -> requests -> results in the journal -> output and error file -> end.json

A result counts once the journal has it. Whatever is interrupted, another run of the same batch continues: it sends the
lines again that have no result, and makes the files again until end.json names them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from deployments.batch.batch_store import BatchStore, State
from deployments.batch.disk import Disk
from deployments.batch.file_store import FileStore
from deployments.batch.in_process import LineCall
from deployments.batch.input_lines import (
    InputLine,
    LineError,
    input_lines,
    parse_line,
    read_line,
)
from deployments.batch.journal import Journal, JournalLostError
from deployments.batch.journal_writer import JournalWriter
from deployments.batch.line_runner import LineRunner, error_record
from deployments.batch.line_slots import LineSlots
from deployments.batch.options import BatchOptions
from deployments.batch.outputs import write_outputs

__all__ = ["BatchRun", "Workplace"]

logger = logging.getLogger("ray.serve")

REPORT_S = 1.0
T = TypeVar("T")


@dataclass(frozen=True)
class Workplace:
    """What every run needs.

    Attributes:
        disk: writes.
        files: for the output.
        batches: their states.
        options: limits.
        call: sends a line.
        slots: bound the lines that are sent at once.
        executor: has the threads that read and write.
    """

    disk: Disk
    files: FileStore
    batches: BatchStore
    options: BatchOptions
    call: LineCall
    slots: LineSlots
    executor: Executor
    clock: Callable[[], float] = time.time


class BatchRun:
    """One run.

    Args:
        work: what every run needs.
        state: the batch as it is now.
        lease: the number of the runner's lease.
    """

    def __init__(self, work: Workplace, state: State, lease: int) -> None:
        self._work = work
        self._state = state
        self._lease = lease
        self._batch = state.batch
        self._path = work.batches.path(state.batch.id)
        self._progress: dict[str, Any] = dict(state.progress)
        self._lines: Sequence[InputLine] = ()
        self._runner = LineRunner(
            self._batch.id, self._path / "input.jsonl", self._batch.endpoint, work.call, work.slots, work.executor
        )
        self._stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def stop(self, status: str) -> None:
        """End the batch early, as ``cancelled`` or ``expired``; unfinished lines are aborted."""
        if not self._stopped.done():
            self._stopped.set_result(status)

    async def run(self) -> None:
        """Compute the batch, and end it, or return when another run has. Cancelling the call leaves it for another run.

        Raises:
            OSError: the directory cannot be read or written.
            JournalLostError: another runner has claimed the batch.
        """
        loss: Exception | None = None
        try:
            await self._run()
        except (FileNotFoundError, JournalLostError) as error:
            loss = error
        finally:
            has_ended = await self._in_thread(lambda: self._work.batches.tidy(self._batch.id))
        if loss is not None and not has_ended:
            raise loss

    async def _run(self) -> None:
        if not await self._read_lines():
            return
        journal = await self._in_thread(
            lambda: Journal(self._work.disk, self._path, self._lease), if_cancelled=Journal.close
        )
        writer = JournalWriter(journal, self._work.executor)
        try:
            await self._start(journal)
            status = await self._compute(journal, writer)
            await writer.settle()
            self._progress["finalizing_at"] = self._now()
            await self._report(journal)
            if status == "expired":
                await self._expire(journal, writer)
            await self._in_thread(lambda: self._finish(journal, status))
        finally:
            await writer.close()

    async def _read_lines(self) -> bool:
        """Find the lines; False if the batch has failed because of them."""
        limit, path = self._work.options.max_lines, self._path / "input.jsonl"

        def read() -> list[InputLine]:
            lines = input_lines(path, self._batch.endpoint, self._work.options.max_line_bytes)
            return list(islice(lines, limit + 1))

        self._lines = await self._in_thread(read)
        if not self._lines:
            error = {"code": "empty_file", "message": "the input file has no lines; give at least one request"}
        elif len(self._lines) > limit:
            error = {"code": "too_many_lines", "message": f"the input file has more than {limit} lines; split it"}
        else:
            return True
        errors = {"object": "list", "data": [{**error, "line": None, "param": None}]}
        end = {"status": "failed", "failed_at": self._now(), "errors": errors}
        await self._in_thread(lambda: self._work.batches.end(self._batch.id, end))
        return False

    async def _start(self, journal: Journal) -> None:
        self._progress.pop("finalizing_at", None)  # of a run that did not end
        self._progress.setdefault("in_progress_at", self._now())
        await self._report(journal)
        if len(journal):
            logger.info(
                "batch %s continues: %d of %d lines have a result", self._batch.id, len(journal), len(self._lines)
            )

    # --- the lines ----------------------------------------------------------------------------------------------------

    async def _compute(self, journal: Journal, writer: JournalWriter) -> str:
        """Compute the lines without a result; returns the status of the end."""
        if self._stopped.done():
            return self._stopped.result()
        work = asyncio.create_task(
            self._runner.run([line for line in self._lines if line.index not in journal], writer)
        )
        try:
            while True:
                either: list[asyncio.Future[Any]] = [work, self._stopped]
                await asyncio.wait(either, timeout=REPORT_S, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    _raise_first(work)
                    return "completed"
                if self._stopped.done():
                    return self._stopped.result()
                await self._report(journal)
        finally:
            work.cancel()
            await asyncio.wait([work])

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _expire(self, journal: Journal, writer: JournalWriter) -> None:
        """Give every line without a result an error."""
        lines = [line for line in self._lines if line.index not in journal]
        custom_ids = await self._in_thread(lambda: [self._custom_id(line) for line in lines])
        problem = f"the batch has expired: the line was not computed within {self._batch.completion_window}"
        errors = [LineError("batch_expired", problem, custom_id) for custom_id in custom_ids]
        records = [error_record(self._batch.id, line.index, e) for line, e in zip(lines, errors, strict=True)]
        await asyncio.gather(*(writer.append(record) for record in records))

    def _custom_id(self, line: InputLine) -> str | None:
        if line.error is not None:
            return line.error.custom_id
        return parse_line(read_line(self._path / "input.jsonl", line), self._batch.endpoint).custom_id

    def _finish(self, journal: Journal, status: str) -> None:
        journal.require_claim()
        output = write_outputs(self._work.files, self._batch, journal)
        end = self._described(journal) | output | {"status": status, f"{status}_at": self._now()}
        if not self._work.batches.end(self._batch.id, end):
            for file_id in filter(None, output.values()):
                self._work.files.delete(file_id)

    # --- progress -----------------------------------------------------------------------------------------------------

    async def _report(self, journal: Journal) -> None:
        described = self._described(journal)
        await self._in_thread(lambda: self._work.batches.report(self._batch.id, journal.number, described))

    def _described(self, journal: Journal) -> dict[str, Any]:
        tokens, num_errors = journal.tokens, journal.num_errors
        counts = {"total": len(self._lines), "completed": len(journal) - num_errors, "failed": num_errors}
        usage = {
            "input_tokens": tokens.input,
            "input_tokens_details": {"cached_tokens": tokens.cached},
            "output_tokens": tokens.output,
            "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
            "total_tokens": tokens.input + tokens.output,
        }
        return {
            **self._progress,
            "model": self._runner.model or self._progress.get("model"),
            "request_counts": counts,
            "usage": usage,
        }

    def _now(self) -> int:
        return int(self._work.clock())

    async def _in_thread(self, function: Callable[[], T], if_cancelled: Callable[[T], object] | None = None) -> T:
        """Return what a function returns in a thread.

        Cancelling the call waits for the function, which must not write after the end of the run, and passes what it
        returns to ``if_cancelled``.
        """
        future = asyncio.get_running_loop().run_in_executor(self._work.executor, function)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            if future.exception() is None and if_cancelled is not None:
                if_cancelled(future.result())
            raise


def _raise_first(task: asyncio.Task[None]) -> None:
    """Raise the first of the errors of a group of tasks."""
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error
