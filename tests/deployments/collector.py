"""A collector of OpenTelemetry spans in this process: the OTLP receiver that an ingress exports to."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from tests.waiting import until

SERVER, ERROR = 2, 2  # the protocol's numbers of a span's kind and of a status


@dataclass
class Span:
    """One span as it arrived."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    kind: int
    start: int  # Unix nanoseconds
    end: int
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector:
    """What has arrived so far."""

    url: str
    spans: list[Span] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    status: int = 200  # with which exports are answered

    def wait_for(self, count: int) -> list[Span]:
        """Return the spans once there are as many."""
        return self.wait_until(lambda: len(self.spans) >= count)

    def wait_until(self, done: Callable[[], bool]) -> list[Span]:
        """Return the spans once ``done`` is true."""
        until(done, "the spans have arrived", pause_s=0.01, details=lambda: [span.name for span in self.spans])
        return list(self.spans)

    def receive(self, path: str, body: bytes) -> None:
        """Take one export."""
        self.paths.append(path)
        for of_process in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _as_dict(of_process.resource.attributes)
            for scope in of_process.scope_spans:
                self.spans += [
                    Span(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.kind,
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        span.status.code,
                        _as_dict(span.attributes),
                        resource,
                    )
                    for span in scope.spans
                ]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Listen on a free loopback port while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if collector.status == 200:
                collector.receive(self.path, body)
            else:
                collector.refused.append(self.path)
            self.send_response(collector.status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *args: object) -> None:
            """Be silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def root_span(spans: Sequence[Span]) -> Span:
    """Return the span of the only request."""
    (root,) = [span for span in spans if span.kind == SERVER]
    return root


def child_spans(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of the phases, by time."""
    return sorted((span for span in spans if span.kind != SERVER), key=lambda span: (span.start, span.end))


def _as_dict(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, str(kind))
