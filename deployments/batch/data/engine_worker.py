"""EngineWorker: an engine and its endpoints in an actor of Ray Data, which answers blocks of requests."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from typing import Any

import pyarrow as pa

from deployments.batch.answers import final_answer, record_of, request_body
from deployments.batch.data.result_sink import RESULTS
from deployments.batch.input_lines import line_id, parse_line
from deployments.batch.offline.local_engine import local_engine
from deployments.config import AppConfig

__all__ = ["BLOCKS_AT_ONCE", "EngineWorker"]

BLOCKS_AT_ONCE = 2  # so that the engine has work while the last requests of a block end


class EngineWorker:
    """Called with a block of requests, returns their results. Several threads may call it.

    Args:
        arguments: of the application, as in a Serve config file.
        endpoint: of every line.

    Raises:
        PagodaError: the engine cannot start.
    """

    def __init__(self, arguments: dict[str, Any], endpoint: str) -> None:
        self._endpoint = endpoint
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="batch-engine", daemon=True).start()
        self._engine = AsyncExitStack()  # the engine ends with the process of the actor
        started = self._engine.enter_async_context(local_engine(AppConfig.parse(arguments)))
        self._call, num_lines = asyncio.run_coroutine_threadsafe(started, self._loop).result()
        self._slots = asyncio.Semaphore(num_lines + num_lines // 4)

    def __call__(self, lines: pa.Table) -> pa.Table:
        """Answer lines, which have been checked."""
        return asyncio.run_coroutine_threadsafe(self._answer_all(lines.to_pylist()), self._loop).result()

    async def _answer_all(self, lines: list[dict[str, Any]]) -> pa.Table:
        return pa.Table.from_pylist(await asyncio.gather(*map(self._answer, lines)), schema=RESULTS)

    async def _answer(self, row: dict[str, Any]) -> dict[str, Any]:
        line = parse_line(row["text"], self._endpoint)
        body = request_body(self._endpoint, line.body)
        request_id = line_id(row["path"], row["number"])
        async with self._slots:
            answer = await final_answer(self._call, self._endpoint, body, request_id, row["path"])
        record, _ = record_of(row["path"], row["number"], line.custom_id, answer)
        return {"text": record.text}
