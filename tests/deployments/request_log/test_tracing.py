"""Tracing: whether there are spans, their parents, and their way to a collector."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.api.middleware import RecordRequests
from deployments.config import AppConfig, TracingOptions
from deployments.request_log.record import RequestRecord
from deployments.request_log.tracing import (
    NullTracer,
    SpanTracer,
    open_tracer,
    require_exporter,
    spans_wanted,
    traces_url,
)
from engine.errors import ConfigError
from tests.deployments.collector import Collector, root_span
from tests.deployments.conftest import OpenClient

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the secret cache"}]}
CALLER, CALLERS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_the_resource_names_the_service(traced: TestClient, collector: Collector) -> None:
    traced.post("/v1/chat/completions", json=CHAT)
    resource = collector.wait_for(5)[0].resource
    assert resource["service.name"] == "pagoda"
    assert resource["service.version"]
    assert resource["service.instance.id"]


def test_an_operator_may_name_the_service(
    open_client: OpenClient, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chatbot")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/elsewhere")
    open_client().post("/v1/chat/completions", json=CHAT)
    assert collector.wait_for(5)[0].resource["service.name"] == "chatbot"
    assert collector.paths[0] == "/elsewhere"  # this variable holds a full address


@pytest.mark.parametrize("sampled", [True, False])
def test_the_caller_decides_on_sampling_and_is_the_parent(
    open_client: OpenClient, collector: Collector, serve_log: list[logging.LogRecord], sampled: bool
) -> None:
    # The sample ratio is the opposite of the caller's decision.
    client = open_client(tracing={"otlp_endpoint": collector.url, "sample_ratio": 0.0 if sampled else 1.0})
    header = f"00-{CALLER}-{CALLERS_SPAN}-0{int(sampled)}"
    client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": header, "tracestate": "a=1"})
    line = serve_log[-1].getMessage()
    if sampled:
        root = root_span(collector.wait_for(5))
        assert (root.trace_id, root.parent) == (CALLER, CALLERS_SPAN)
        assert f"trace_id={CALLER}" in line
    else:
        client.post("/v1/chat/completions", json=CHAT)  # the sample ratio decides
        root = root_span(collector.wait_for(5))
        assert root.trace_id != CALLER
        assert "trace_id" not in line


@pytest.mark.parametrize("header", ["", "00-zz-zz-01", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "x" * 5000])
def test_a_bad_context_begins_a_new_trace(traced: TestClient, collector: Collector, header: str) -> None:
    assert traced.post("/v1/chat/completions", json=CHAT, headers={"traceparent": header}).status_code == 200
    assert root_span(collector.wait_for(5)).parent == ""


def test_a_span_of_this_process_is_no_parent_of_a_request(collector: Collector) -> None:
    """Ray or a library may have one open; only the caller's header says what the parent is."""
    tracer = open_tracer(TracingOptions(otlp_endpoint=collector.url), "tiny")
    assert isinstance(tracer, SpanTracer)
    now = time.monotonic()
    record = RequestRecord("id", "/v1/completions", started=now, ended=now + 1)
    with tracer._tracer.start_as_current_span("of a library"):
        trace_id = tracer.export(record)
    tracer.close()
    root = next(span for span in collector.spans if span.name != "of a library")
    assert (root.trace_id, root.parent) == (trace_id, "")


async def test_a_client_that_disconnects_ends_its_spans(collector: Collector) -> None:
    tracer = open_tracer(TracingOptions(otlp_endpoint=collector.url), "tiny")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data", "more_body": True})
        raise asyncio.CancelledError

    async def nothing(*args: Any) -> None:
        """Receive and send nothing."""

    served = RecordRequests(app, on_end=lambda record: ids.append(tracer.export(record)))
    ids: list[str] = []
    with pytest.raises(asyncio.CancelledError):
        await served({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, nothing, nothing)
    await asyncio.to_thread(tracer.close)
    (root,) = collector.spans
    assert (root.trace_id, root.attributes["error.type"]) == (ids[0], "client_closed_request")


def test_a_collector_that_refuses_disturbs_no_request(
    open_client: OpenClient, collector: Collector, serve_log: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("opentelemetry.exporter.otlp", "opentelemetry.sdk"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])  # another test's may be silent for its minute
    collector.status = 400  # an export with this answer is not tried again
    client = open_client(tracing={"otlp_endpoint": collector.url})
    for count in range(1, 4):
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        collector.wait_until(lambda wanted=count: len(collector.refused) >= wanted)  # type: ignore[misc]
    complaints = [record.getMessage() for record in serve_log if "spans could not be sent" in record.getMessage()]
    assert len(complaints) == 1, complaints


@pytest.mark.parametrize("name", ["opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk.trace.export"])
def test_warnings_of_the_sdk_are_in_our_log(
    name: str, open_client: OpenClient, serve_log: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    for parent in ("opentelemetry.exporter.otlp", "opentelemetry.sdk"):
        monkeypatch.setattr(logging.getLogger(parent), "handlers", [])
    open_client(tracing={"otlp_endpoint": "http://127.0.0.1:9"})
    logging.getLogger(name).warning("the queue is full")
    assert "at most once a minute): the queue is full" in serve_log[-1].getMessage()


def test_nothing_is_imported_while_tracing_is_off() -> None:
    code = (
        "import sys\n"
        "from deployments.config import TracingOptions\n"
        "from deployments.request_log.tracing import NullTracer, open_tracer\n"
        "before = set(sys.modules)\n"
        "assert isinstance(open_tracer(TracingOptions(), 'm'), NullTracer)\n"
        "assert set(sys.modules) == before, set(sys.modules) - before\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_without_the_exporter_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"\[tracing\]"):
        open_tracer(TracingOptions(otlp_endpoint="http://127.0.0.1:4318"), "m")
    assert isinstance(open_tracer(TracingOptions(), "m"), NullTracer)


def test_an_unsupported_protocol_in_the_environment_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, serve_log: list[logging.LogRecord]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert isinstance(open_tracer(TracingOptions(), "m"), NullTracer)
    assert "OTEL_EXPORTER_OTLP_PROTOCOL='grpc'" in serve_log[-1].getMessage()


def test_another_protocol_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL='grpc'.*http/protobuf"):
        require_exporter()


@pytest.mark.parametrize(
    ("endpoint", "environment", "wanted"),
    [
        (None, {}, False),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ("http://c:4318", {}, True),
        ("http://c:4318", {"OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_what_turns_spans_on_and_off(endpoint: str | None, environment: dict[str, str], wanted: bool) -> None:
    assert spans_wanted(TracingOptions(otlp_endpoint=endpoint), environment) == wanted


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [("http://c:4318", "http://c:4318/v1/traces"), ("https://c/", "https://c/v1/traces"), ("http://c/x", "http://c/x")],
)
def test_where_spans_are_posted(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize(
    "options", [{"otlp_endpoint": "collector:4318"}, {"sample_ratio": 1.5}, {"endpoint": "http://c"}]
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"args\.tracing|'{next(iter(options))}'"):
        AppConfig.parse({"model": "m", "tracing": options})
