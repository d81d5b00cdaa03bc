"""run_batch: runs the requests of a file without /v1/batches, with an engine in this process or at a server.

Each result is durable before it counts, so the same command continues after an interruption.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deployments.api.json_response import encode_json
from deployments.batch.answers import ENDPOINTS, request_body
from deployments.batch.in_process import LineCall
from deployments.batch.input_lines import InputLine, input_lines, line_id, read_line
from deployments.batch.journal import Record
from deployments.batch.journal_writer import JournalWriter
from deployments.batch.line_runner import LineRunner
from deployments.batch.line_slots import LineSlots
from deployments.batch.offline.counts import Counts
from deployments.batch.offline.http_call import HttpCall
from deployments.batch.offline.result_file import ResultFile
from deployments.config import AppConfig
from engine.errors import ConfigError

__all__ = ["CONCURRENCY", "OfflineBatch", "application_of", "run_batch"]

MAX_LINE_BYTES = 64 * 2**20
CONCURRENCY = 64  # lines at once at a server


@dataclass(frozen=True)
class OfflineBatch:
    """What is to be run.

    Attributes:
        input: a JSONL file, as for /v1/batches.
        out: the file of results and errors, which an interrupted run has left, or a new one.
        url: of a server; None: an engine is started in this process.
        config: the Serve config file with the engine's options, without ``url``.
        key: the API key of the server.
        concurrency: lines at once at the server.
    """

    input: Path
    out: Path
    url: str | None = None
    config: Path = Path("serve_config.yaml")
    key: str = ""
    concurrency: int = CONCURRENCY


async def run_batch(batch: OfflineBatch, on_progress: Callable[[Counts], None] = lambda counts: None) -> Counts:
    """Run a batch to its end, or continue it; returns how many lines have which result.

    Args:
        batch: what is to be run.
        on_progress: called after each write of results.

    Raises:
        ConfigError: a file cannot be used, the server cannot be reached, or the options of the engine are wrong.
        PagodaError: the engine cannot start.
        OSError: a result cannot be written.
    """
    endpoint, lines, ids = await asyncio.to_thread(_read, batch.input)
    results = _Results(ResultFile(batch.out, set(ids)), len(lines), on_progress)
    try:
        remaining = [line for line, line_id in zip(lines, ids, strict=True) if line_id not in results.done]
        on_progress(results.counts)
        if remaining:
            await _run(batch, endpoint, remaining, results)
    finally:
        results.close()
    return results.counts


class _Results:
    """A result file, with what is in it counted."""

    def __init__(self, file: ResultFile, total: int, on_progress: Callable[[Counts], None]) -> None:
        self._file = file
        self._on_progress = on_progress
        self.done = file.done
        self.counts = Counts(total, len(file.done) - file.num_errors, file.num_errors)

    def append(self, records: list[Record]) -> None:
        self._file.append(records)
        for record in records:
            self.counts.failed += record.is_error
            self.counts.completed += not record.is_error
        self._on_progress(self.counts)

    def close(self) -> None:
        self._file.close()


async def _run(batch: OfflineBatch, endpoint: str, lines: list[InputLine], results: _Results) -> None:
    batch_id = await asyncio.to_thread(_batch_id, batch.input)
    executor = ThreadPoolExecutor(2, thread_name_prefix="batch-io")
    writer = JournalWriter(results, executor)
    try:
        async with _opened(batch) as (call, num_lines):
            slots = LineSlots(lambda: num_lines)
            body_of = request_body if batch.url is None else _unchanged
            runner = LineRunner(batch_id, batch.input, endpoint, call, slots, executor, body_of)
            await runner.run(lines, writer)
    finally:
        await writer.settle()
        executor.shutdown(wait=False)


@asynccontextmanager
async def _opened(batch: OfflineBatch) -> AsyncIterator[tuple[LineCall, int]]:
    """Yield what sends a line, and how many lines at once."""
    if batch.url is None:
        config = _app_config(batch.config)
        from deployments.batch.offline.local_engine import local_engine  # slow: it loads torch

        async with local_engine(config) as (call, num_lines):
            yield call, num_lines + num_lines // 4
        return
    http = HttpCall(batch.url, batch.key, batch.concurrency)
    await asyncio.to_thread(http.require_server)
    try:
        yield http, batch.concurrency
    finally:
        http.close()


def application_of(path: Path) -> dict[str, Any]:
    """Return the arguments of the application of a Serve config file.

    Raises:
        ConfigError: there are none.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        arguments: dict[str, Any] = document["applications"][0]["args"]
    except OSError as error:
        raise ConfigError(f"--config='{path}' cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, IndexError):
        raise ConfigError(f"--config='{path}' has no applications[0].args; serve_config.yaml shows them") from None
    return arguments


def _app_config(path: Path) -> AppConfig:
    """Return the application of a Serve config file.

    Raises:
        ConfigError: there is none, or it is wrong.
    """
    config = AppConfig.parse(application_of(path))
    config.require_model()
    return config


def _read(path: Path) -> tuple[str, list[InputLine], list[str]]:
    """Return the endpoint of an input, its lines, and the id of each."""
    try:
        endpoint = _endpoint(path)
        batch_id = _batch_id(path)
        lines = list(input_lines(path, endpoint, MAX_LINE_BYTES))
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read: {error.strerror}") from None
    if not lines:
        raise ConfigError(f"'{path}' has no lines; give at least one request")
    return endpoint, lines, [line_id(batch_id, line.index) for line in lines]


def _endpoint(path: Path) -> str:
    """Return the endpoint that most inputs name in every line: that of the first line with a valid one."""
    for line in input_lines(path, ENDPOINTS[0], MAX_LINE_BYTES):
        try:
            url = json.loads(read_line(path, line))["url"]
        except (ValueError, RecursionError, KeyError, TypeError):
            continue
        if url in ENDPOINTS:
            return str(url)
    return ENDPOINTS[0]


def _batch_id(path: Path) -> str:
    with path.open("rb") as file:
        return f"batch_{hashlib.file_digest(file, 'sha256').hexdigest()[:32]}"


def _unchanged(endpoint: str, body: dict[str, Any]) -> bytes:
    return encode_json(body).encode(errors="backslashreplace")
