"""LineRunner: sends lines, as many at once as there are slots, and appends a result for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

from deployments.api.json_response import encode_json
from deployments.batch.answers import final_answer, record_of, request_body
from deployments.batch.in_process import LineCall
from deployments.batch.input_lines import InputLine, LineError, error_line, line_id, parse_line, read_line
from deployments.batch.journal import Record
from deployments.batch.journal_writer import JournalWriter
from deployments.batch.line_slots import LineSlots
from deployments.observability.ingress_metrics import BATCH_LINES, ingress_recorder

__all__ = ["LineRunner", "error_record"]

_ERRORS_AT_ONCE = 256  # lines
_INLINE_BYTES = 2**16  # a longer answer would delay every stream of this process
T = TypeVar("T")


class LineRunner:
    """Runs the lines of one input.

    Args:
        batch_id: names the lines' requests.
        path: of the input.
        endpoint: of every line.
        call: sends a line.
        slots: bound the lines that are sent at once.
        executor: has the threads that read.
        body_of: returns the body to send for the endpoint and the body of a line.

    Attributes:
        model: that an answer has named; None before.
    """

    def __init__(
        self,
        batch_id: str,
        path: Path,
        endpoint: str,
        call: LineCall,
        slots: LineSlots,
        executor: Executor,
        body_of: Callable[[str, dict[str, Any]], bytes] = request_body,
    ) -> None:
        self.model: str | None = None
        self._batch_id = batch_id
        self._path = path
        self._endpoint = endpoint
        self._call = call
        self._slots = slots
        self._executor = executor
        self._body_of = body_of

    async def run(self, lines: Sequence[InputLine], writer: JournalWriter) -> None:
        """Return when every line has a durable result. Cancelling the call aborts what is sent.

        Raises:
            ExceptionGroup: of OSError, if a result cannot be read or written.
        """
        failed = [(line, line.error) for line in lines if line.error is not None]
        for start in range(0, len(failed), _ERRORS_AT_ONCE):
            several = failed[start : start + _ERRORS_AT_ONCE]
            await asyncio.gather(*(self._fail(line, error, writer) for line, error in several))
        async with asyncio.TaskGroup() as group:
            for line in lines:
                if line.error is not None:
                    continue
                await self._slots.acquire()
                try:
                    task = group.create_task(self._line(line, writer))
                except BaseException:
                    self._slots.release()
                    raise
                task.add_done_callback(lambda _: self._slots.release())
                await asyncio.sleep(0)  # a burst would hold up every stream of this process

    async def _line(self, line: InputLine, writer: JournalWriter) -> None:
        """Answer one line, durably."""
        try:
            custom_id, body = await self._in_thread(lambda: self._request(line))  # it reads, perhaps over a network
        except LineError as error:
            await self._fail(line, error, writer)
            return
        request_id = line_id(self._batch_id, line.index)
        answer = await final_answer(self._call, self._endpoint, body, request_id, self._batch_id)

        def result() -> tuple[Record, str | None]:
            return record_of(self._batch_id, line.index, custom_id, answer)

        record, model = result() if len(answer.body) <= _INLINE_BYTES else await self._in_thread(result)
        self.model = self.model or model
        await writer.append(record)
        _count(record)

    def _request(self, line: InputLine) -> tuple[str, bytes]:
        parsed = parse_line(read_line(self._path, line), self._endpoint)
        return parsed.custom_id, self._body_of(self._endpoint, parsed.body)

    async def _fail(self, line: InputLine, error: LineError, writer: JournalWriter) -> None:
        record = error_record(self._batch_id, line.index, error)
        await writer.append(record)
        _count(record)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)


def error_record(batch_id: str, index: int, error: LineError) -> Record:
    """Return the result of a line that was not answered."""
    text = encode_json(error_line(batch_id, index, error)).encode(errors="backslashreplace")
    return Record(index, is_error=True, text=text)


def _count(record: Record) -> None:
    ingress_recorder().increment(BATCH_LINES, outcome="failed" if record.is_error else "completed")
