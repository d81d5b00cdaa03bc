"""The spans of requests, from an ingress over fake engines to a collector."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from ray.exceptions import ActorDiedError
from starlette.testclient import TestClient

from deployments.api.asgi import RecordRequests
from deployments.config import AppConfig, TracingOptions
from deployments.requests.attempt import Attempt
from deployments.requests.record import RequestRecord
from deployments.requests.spans import phases
from deployments.requests.tracing import NullTracer, open_tracer, require_exporter, spans_wanted, traces_url
from engine.errors import ConfigError, OverloadedError
from engine.outputs import RequestTiming
from tests.deployments.collector import ERROR, SERVER, Collector, Span, collecting
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import FakeEngines, output

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the secret cache"}]}
PHASES = ["route", "queue", "prefill", "decode"]
FIRST, LAST = RequestTiming(0.002, 0.003), RequestTiming(0.002, 0.003, 0.004)
CALLER, CALLERS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")  # milliseconds
    with collecting() as made:
        yield made


@pytest.fixture
def traced(open_client: OpenClient, collector: Collector, engines: FakeEngines) -> TestClient:
    engines.scripts = [[output([70], timing=FIRST), output([71, 72], "stop", cached=0, timing=LAST)]]
    return open_client(tracing={"otlp_endpoint": collector.url})


def _root(spans: Sequence[Span]) -> Span:
    (root,) = [span for span in spans if span.kind == SERVER]
    return root


def _children(spans: Sequence[Span]) -> list[Span]:
    return sorted((span for span in spans if span.kind != SERVER), key=lambda span: (span.start, span.end))


def _require_nesting(root: Span, children: Sequence[Span]) -> None:
    assert {span.parent for span in children} == {root.span_id}
    assert {span.trace_id for span in children} == {root.trace_id}
    at = root.start
    for span in children:
        assert at <= span.start <= span.end <= root.end, span
        at = span.end
    assert abs(root.end - time.time_ns()) < 60e9


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_becomes_a_tree_of_spans(traced: TestClient, collector: Collector, stream: bool) -> None:
    answer = traced.post("/v1/chat/completions", json=CHAT | {"stream": stream, "temperature": 0.7, "max_tokens": 9})
    assert answer.status_code == 200
    spans = collector.wait_for(5)
    root, children = _root(spans), _children(spans)
    assert collector.paths == ["/v1/traces"] * len(collector.paths)
    assert (root.name, root.parent) == ("chat tiny", "")
    assert sorted(span.name for span in children) == sorted(PHASES)
    _require_nesting(root, sorted(children, key=lambda span: PHASES.index(span.name)))
    said = root.attributes
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.provider.name"] == "pagoda"
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == "tiny"
    assert (said["gen_ai.request.temperature"], said["gen_ai.request.max_tokens"]) == (0.7, 9)
    assert (said["gen_ai.request.top_p"], said["gen_ai.request.stream"]) == (1.0, stream)
    assert (said["gen_ai.usage.output_tokens"], said["gen_ai.response.finish_reasons"]) == (3, ["stop"])
    assert said["gen_ai.usage.input_tokens"] > 3
    assert said["http.response.status_code"] == 200
    assert (said["pagoda.replica"], said["pagoda.migrations"]) == ("r1", 0)
    assert said["gen_ai.response.id"].startswith("chatcmpl-")
    if not stream:
        assert said["gen_ai.response.id"] == answer.json()["id"]
    assert "error.type" not in said


def test_latencies_are_the_engines(traced: TestClient, collector: Collector) -> None:
    traced.post("/v1/completions", json={"prompt": "the cache"})
    spans = collector.wait_for(5)
    said = _root(spans).attributes
    assert _root(spans).name == "text_completion tiny"
    assert said["gen_ai.latency.time_in_queue"] == pytest.approx(0.002)
    assert said["gen_ai.latency.time_in_model_prefill"] == pytest.approx(0.003)
    assert said["gen_ai.latency.time_in_model_decode"] == pytest.approx(0.004)
    assert said["gen_ai.latency.time_in_model_inference"] == pytest.approx(0.007)
    assert 0 < said["gen_ai.latency.time_to_first_token"] <= said["gen_ai.latency.e2e"]


def test_names_are_those_of_the_conventions(traced: TestClient, collector: Collector) -> None:
    traced.post("/v1/chat/completions", json=CHAT | {"seed": 3})
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    said = {name for span in collector.wait_for(5) for name in span.attributes if name.startswith("gen_ai.")}
    ours = {name for name in said if not name.startswith("gen_ai.latency.")} - {"gen_ai.request.id"}  # vLLM's
    assert ours <= known
    assert len(ours) >= 14


def test_no_text_leaves(traced: TestClient, collector: Collector) -> None:
    traced.post("/v1/chat/completions", json=CHAT | {"stop": ["secret stop"], "user": "secret user"})
    assert "secret" not in repr(collector.wait_for(5))


def test_the_resource_says_who_we_are(traced: TestClient, collector: Collector) -> None:
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
def test_the_caller_decides_and_is_the_parent(
    open_client: OpenClient, collector: Collector, serve_log: list[logging.LogRecord], sampled: bool
) -> None:
    # The ratio is the opposite of what the caller says.
    client = open_client(tracing={"otlp_endpoint": collector.url, "sample_ratio": 0.0 if sampled else 1.0})
    header = f"00-{CALLER}-{CALLERS_SPAN}-0{int(sampled)}"
    client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": header, "tracestate": "a=1"})
    line = serve_log[-1].getMessage()
    if sampled:
        root = _root(collector.wait_for(5))
        assert (root.trace_id, root.parent) == (CALLER, CALLERS_SPAN)
        assert f"trace_id={CALLER}" in line
    else:
        client.post("/v1/chat/completions", json=CHAT)  # nobody has decided this one
        root = _root(collector.wait_for(5))
        assert root.trace_id != CALLER
        assert "trace_id" not in line


@pytest.mark.parametrize("header", ["", "00-zz-zz-01", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "x" * 5000])
def test_a_bad_context_begins_a_new_trace(traced: TestClient, collector: Collector, header: str) -> None:
    assert traced.post("/v1/chat/completions", json=CHAT, headers={"traceparent": header}).status_code == 200
    assert _root(collector.wait_for(5)).parent == ""


def test_a_migration_shows_two_attempts(traced: TestClient, collector: Collector, engines: FakeEngines) -> None:
    second = [output([71], replica="r2", cached=4, timing=FIRST), output([72], "length", replica="r2", timing=LAST)]
    engines.scripts = [[output([70], timing=FIRST), ActorDiedError()], second]
    traced.post("/v1/chat/completions", json=CHAT | {"stream": True})
    spans = collector.wait_for(9)
    root = _root(spans)
    attempts: defaultdict[int, list[Span]] = defaultdict(list)
    for span in _children(spans):
        attempts[span.attributes["pagoda.attempt"]].append(span)
    assert [sorted(span.name for span in attempts[number]) for number in (0, 1)] == [sorted(PHASES)] * 2
    assert [{span.attributes["pagoda.replica"] for span in attempts[number]} for number in (0, 1)] == [{"r1"}, {"r2"}]
    _require_nesting(root, [span for n in (0, 1) for span in sorted(attempts[n], key=lambda s: PHASES.index(s.name))])
    (lost,) = [span for span in spans if span.status == ERROR]
    assert (lost.name, lost.attributes["error.type"]) == ("decode", "ActorDiedError")
    cached = {
        span.attributes["pagoda.attempt"]: span.attributes["pagoda.cached_tokens"]
        for span in spans
        if span.name == "prefill"
    }
    assert cached == {0: 0, 1: 4}
    assert root.attributes["pagoda.migrations"] == 1
    assert root.attributes["gen_ai.latency.time_in_queue"] == pytest.approx(0.004)


def test_an_error_after_the_first_byte_marks_the_request(
    traced: TestClient, collector: Collector, engines: FakeEngines
) -> None:
    engines.scripts = [[output([70], timing=FIRST), ActorDiedError()]]
    traced.post("/v1/chat/completions", json=CHAT | {"stream": True})
    root = _root(collector.wait_for(1 + 4 * 4))  # each replica gives one token and is lost
    assert (root.status, root.attributes["error.type"]) == (ERROR, "replica_lost")
    assert root.attributes["http.response.status_code"] == 200  # that was sent before


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/chat/completions", CHAT | {"n": 0}, 400, "refused"),
        ("/v1/completions", {}, 400, "refused"),
        ("/v1/chat/completions", CHAT | {"model": "other"}, 404, "model_not_found"),
    ],
)
def test_a_refused_request_has_a_span_of_its_own(
    traced: TestClient, collector: Collector, path: str, body: dict[str, Any], status: int, kind: str
) -> None:
    assert traced.post(path, json=body).status_code == status
    (root,) = collector.wait_for(1)
    assert root.attributes["http.response.status_code"] == status
    assert root.attributes["error.type"] == kind
    assert root.status != ERROR  # the client's mistake


def test_an_overloaded_replica_shows_where(traced: TestClient, collector: Collector, engines: FakeEngines) -> None:
    error = OverloadedError("full")
    error.replica = "r1"
    engines.scripts = [[error]]
    assert traced.post("/v1/chat/completions", json=CHAT).status_code == 503
    spans = collector.wait_until(lambda: any(span.kind == SERVER for span in collector.spans))
    assert {span.name for span in _children(spans)} == {"route"}
    assert _root(spans).status == ERROR
    assert _root(spans).attributes["error.type"] == "overloaded"


async def test_a_client_that_goes_away_ends_its_spans(collector: Collector) -> None:
    tracer = open_tracer(TracingOptions(otlp_endpoint=collector.url), "tiny")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data", "more_body": True})
        raise asyncio.CancelledError

    async def nothing(*args: Any) -> None:
        """Nobody is there."""

    served = RecordRequests(app, on_end=lambda record: ids.append(tracer.export(record)))
    ids: list[str] = []
    with pytest.raises(asyncio.CancelledError):
        await served({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, nothing, nothing)
    await asyncio.to_thread(tracer.close)
    (root,) = collector.spans
    assert (root.trace_id, root.attributes["error.type"]) == (ids[0], "client_closed_request")


def test_a_request_for_several_answers_shows_each(traced: TestClient, collector: Collector) -> None:
    traced.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2, "temperature": 1})
    spans = collector.wait_for(1 + 4 * 4)
    assert {span.attributes["pagoda.answer"] for span in _children(spans)} == {0, 1, 2, 3}
    assert _root(spans).attributes["gen_ai.response.finish_reasons"] == ["stop"] * 4


def test_a_thousand_answers_do_not_make_thousands_of_spans(traced: TestClient, collector: Collector) -> None:
    traced.post("/v1/completions", json={"prompt": ["a"] * 100})
    spans = collector.wait_until(lambda: any(span.kind == SERVER for span in collector.spans))
    assert len(spans) == 1 + 16 * 4


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        (  # on its way for 0.1 s between route and queue
            {"chosen": 10.1, "first_token": 11.0, "last_token": 12.0, "timing": RequestTiming(0.3, 0.5, 0.9)},
            [("route", 10.0, 10.1), ("queue", 10.2, 10.5), ("prefill", 10.5, 11.0), ("decode", 11.0, 11.9)],
        ),
        (  # ended from outside: the engine has not told how long it decoded
            {"chosen": 10.1, "first_token": 11.0, "last_token": 12.0, "timing": RequestTiming(0.3, 0.5)},
            [("route", 10.0, 10.1), ("queue", 10.2, 10.5), ("prefill", 10.5, 11.0), ("decode", 11.0, 12.0)],
        ),
        (  # another router than ours, which does not say when it chose
            {"first_token": 11.0, "last_token": 11.0, "timing": RequestTiming(0.3, 0.5)},
            [("route", 10.0, 10.2), ("queue", 10.2, 10.5), ("prefill", 10.5, 11.0), ("decode", 11.0, 11.0)],
        ),
        (  # durations that cannot be: the clocks of two threads were read in another order
            {"chosen": 10.9, "first_token": 11.0, "last_token": 11.0, "timing": RequestTiming(5.0, 0.5)},
            [("route", 10.0, 10.0), ("queue", 10.0, 10.5), ("prefill", 10.5, 11.0), ("decode", 11.0, 11.0)],
        ),
        ({"chosen": 10.1}, [("route", 10.0, 10.1), ("queue", 10.1, 12.5)]),  # lost before its first token
        ({}, [("route", 10.0, 12.5)]),  # nowhere yet
    ],
)
def test_phases_are_laid_out_from_the_first_token(
    attempt: dict[str, Any], expected: list[tuple[str, float, float]]
) -> None:
    record = RequestRecord("id", "/v1/completions", ended=13.0)
    record.generations = (SimpleNamespace(attempts=[Attempt(started=10.0, ended=12.5, **attempt)]),)  # type: ignore[assignment]
    found = [(phase.name, phase.start, phase.end) for phase in phases(record)]
    assert [name for name, _, _ in found] == [name for name, _, _ in expected]
    assert [times for _, *times in found] == [pytest.approx(times) for _, *times in expected]


def test_tokens_that_come_at_once_are_laid_out_by_the_engines_times(collector: Collector) -> None:
    attempt = Attempt(started=time.monotonic() - 1.0)
    attempt.receive(output([1, 2, 3], "stop", timing=RequestTiming(0.1, 0.2, 0.3)))
    assert attempt.first_token is not None
    assert attempt.last_token is not None
    assert attempt.last_token - attempt.first_token == pytest.approx(0.3)


def test_a_collector_that_refuses_disturbs_nobody(
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


def test_nothing_is_imported_while_tracing_is_off() -> None:
    code = (
        "import sys\n"
        "from deployments.config import TracingOptions\n"
        "from deployments.requests.tracing import NullTracer, open_tracer\n"
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


def test_a_variable_of_the_whole_cluster_stops_no_server(
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
def test_who_says_whether_there_are_spans(endpoint: str | None, environment: dict[str, str], wanted: bool) -> None:
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
