"""The cost of a request's record, its log line and its spans, in microseconds of the ingress' CPU time.

    python -m benchmarks.request_records [--requests 5000] [--out FILE]

Each row is measured in this process: requests with 60 tokens in 16 batches, kept as the ingress keeps them. The lines
go through Serve's own formatter and handlers into a file; the spans through the SDK's batch processor to a collector
that discards them, and the CPU time of the exporter's thread is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import logging.handlers
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from ray._common.formatters import JSONFormatter
from ray.serve._private.logging_utils import ServeFormatter

from benchmarks.machine import describe
from benchmarks.result_file import write_result
from deployments.api.middleware import RecordRequests
from deployments.config import LoggingOptions, TracingOptions
from deployments.request_log.log import RequestLog
from deployments.request_log.record import RequestRecord, current_record
from deployments.request_log.tracing import Tracer, open_tracer
from deployments.transport.request_channel.dispatch import Dispatch
from engine.outputs import EngineOutput, FinishReason, RequestTiming
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

REPEATS = 5
BATCHES = [EngineOutput("id", 0, [1, 2, 3, 4], replica="1kkmte8r") for _ in range(14)]
FIRST = EngineOutput("id", 0, [1], num_cached_tokens=128, replica="1kkmte8r", timing=RequestTiming(0.01, 0.05))
LAST = EngineOutput(
    "id",
    0,
    [1, 2, 3],
    FinishReason.LENGTH,
    num_cached_tokens=128,
    replica="1kkmte8r",
    timing=RequestTiming(0.01, 0.05, 0.5),
)
PARAMS = SamplingParams(max_tokens=64)
REQUEST = EngineRequest("id", [1] * 512, PARAMS)


def generation() -> Any:
    """Return a finished generation as the record sees it, with one attempt that received its outputs one by one."""
    attempt = Dispatch(REQUEST, replica="1kkmte8r")
    attempt.sent_at = attempt.started
    for output in (FIRST, *BATCHES, LAST):
        attempt.record(output)
    attempt.ended = attempt.last_token
    return SimpleNamespace(
        attempts=[attempt],
        finish_reason="length",
        prompt=SimpleNamespace(token_ids=[1] * 512),
        token_ids=[1] * 60,
        num_cached_tokens=128,
        num_migrations=0,
        params=PARAMS,
    )


async def serve(scope: Any, receive: Any, send: Any) -> None:
    """Answer like the ingress, as far as records are concerned."""
    record = current_record()
    record.stream, record.generations, record.response_id = True, (generation(),), f"chatcmpl-{record.request_id}"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """Answer without a record."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def microseconds(app: Any, count: int, finish: Callable[[], None] = lambda: None) -> float:
    """Return the process' CPU time for one request, the least of a few rounds, since disturbances only add time."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"host", b"x"), (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")],
    }

    async def nothing(message: Any = None) -> None:
        """Discard the message."""

    async def run() -> None:
        for number in range(count):
            await app(scope, nothing, nothing)
            if number % 100 == 99:
                await asyncio.sleep(0.01)  # the exporter's queue holds 2,048 spans

    asyncio.run(run())  # once to warm up
    finish()
    times: list[float] = []
    for _ in range(REPEATS):
        started = time.process_time()
        asyncio.run(run())
        finish()
        times.append(time.process_time() - started)
    return round(1e6 * min(times) / count, 1)


def log_to(path: Path, formatter: logging.Formatter) -> None:
    """Configure Serve's logger like a replica, with its file only."""
    handler = logging.handlers.RotatingFileHandler(path)
    handler.setFormatter(formatter)
    memory = logging.handlers.MemoryHandler(1, target=handler)
    logger = logging.getLogger("ray.serve")
    logger.handlers, logger.propagate = [memory], False
    logger.setLevel(logging.INFO)


def _collect(pipe: Connection) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        pipe.send(server.server_address[1])
        server.serve_forever()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    count: int = arguments.requests
    ours, theirs = multiprocessing.Pipe()
    collector = multiprocessing.Process(target=_collect, args=(theirs,), daemon=True)
    collector.start()
    endpoint = f"http://127.0.0.1:{ours.recv()}"
    base = microseconds(bare, count)
    record = microseconds(RecordRequests(serve, on_end=lambda record: None), count)
    result = {"record": round(record - base, 1)}
    with tempfile.TemporaryDirectory() as directory:
        for encoding, formatter in (("TEXT", ServeFormatter("pagoda_ingress", "o9blpb8i")), ("JSON", JSONFormatter())):
            log_to(Path(directory) / "log", formatter)
            log = RequestLog(LoggingOptions.model_validate({"encoding": encoding}))
            result[f"log line, {encoding}"] = round(microseconds(RecordRequests(serve, log.write), count) - record, 1)
    for name, options in (
        ("spans, off", TracingOptions()),
        ("spans, on", TracingOptions(otlp_endpoint=endpoint, sample_ratio=1.0)),
    ):
        tracer = open_tracer(options, "pagoda-demo")
        export = _Exporting(tracer)
        result[name] = round(microseconds(RecordRequests(serve, export), count, _flush(tracer)) - record, 1)
        result[f"{name}: of it while the event loop waits"] = round(1e6 * export.seconds / export.num_calls, 1)
        tracer.close()
    document = {"requests": count, "microseconds_a_request": result, "machine": describe(torch.device("cpu"))}
    print(json.dumps(document, indent=1))
    if arguments.out is not None:
        write_result(arguments.out, document)
    collector.terminate()


class _Exporting:
    """Exports records, and adds up the CPU time of the calling thread."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.seconds = 0.0
        self.num_calls = 0

    def __call__(self, record: RequestRecord) -> None:
        started = time.thread_time()
        self._tracer.export(record)
        self.seconds += time.thread_time() - started
        self.num_calls += 1


def _flush(tracer: Tracer) -> Callable[[], None]:
    provider = getattr(tracer, "_provider", None)
    return (lambda: None) if provider is None else provider.force_flush


if __name__ == "__main__":
    main()
