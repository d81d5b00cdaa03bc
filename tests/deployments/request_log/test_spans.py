"""The spans of a request: their tree, attributes and times."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from ray.exceptions import ActorDiedError
from starlette.testclient import TestClient

from deployments.request_log.record import RequestRecord
from deployments.request_log.spans import phases
from deployments.transport.request_channel.dispatch import Dispatch
from engine.errors import OverloadedError
from engine.outputs import RequestTiming
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.deployments.collector import ERROR, SERVER, Collector, Span, child_spans, root_span
from tests.deployments.fakes import FakeEngines, output
from tests.deployments.request_log.conftest import FIRST, LAST

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the secret cache"}]}
REQUEST = EngineRequest("id", [1, 2, 3], SamplingParams())
PHASES = ["route", "queue", "prefill", "decode"]


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
    root, children = root_span(spans), child_spans(spans)
    assert collector.paths == ["/v1/traces"] * len(collector.paths)
    assert (root.name, root.parent) == ("chat tiny", "")
    assert sorted(span.name for span in children) == sorted(PHASES)
    _require_nesting(root, sorted(children, key=lambda span: PHASES.index(span.name)))
    of_phase = {span.name: span.attributes for span in children}
    assert of_phase["decode"]["gen_ai.usage.output_tokens"] == 3
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


def test_latencies_are_measured_by_the_engine(traced: TestClient, collector: Collector) -> None:
    traced.post("/v1/completions", json={"prompt": "the cache"})
    spans = collector.wait_for(5)
    said = root_span(spans).attributes
    assert root_span(spans).name == "text_completion tiny"
    assert said["gen_ai.latency.time_in_queue"] == pytest.approx(0.002)
    assert said["gen_ai.latency.time_in_model_prefill"] == pytest.approx(0.003)
    assert said["gen_ai.latency.time_in_model_decode"] == pytest.approx(0.004)
    assert said["gen_ai.latency.time_in_model_inference"] == pytest.approx(0.007)
    assert 0 < said["gen_ai.latency.time_to_first_token"] <= said["gen_ai.latency.e2e"]


def test_a_prompt_counts_once_however_many_answers_are_generated(
    traced: TestClient, collector: Collector, engines: FakeEngines
) -> None:
    first, last = output([70], cached=2, logprobs=[-1.0], timing=FIRST), output([71], "stop", logprobs=[-1.0])
    engines.scripts = [[first, last]]
    traced.post("/v1/completions", json={"prompt": [[5] * 4, [6] * 3], "n": 1, "best_of": 3})
    said = root_span(collector.wait_for(1 + 2 * 3 * 4)).attributes
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.cache_read.input_tokens"]) == (7, 4)
    assert said["gen_ai.usage.output_tokens"] == 12


def test_names_are_those_of_the_conventions(traced: TestClient, collector: Collector) -> None:
    traced.post("/v1/chat/completions", json=CHAT | {"seed": 3})
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    said = {name for span in collector.wait_for(5) for name in span.attributes if name.startswith("gen_ai.")}
    ours = {name for name in said if not name.startswith("gen_ai.latency.")} - {"gen_ai.request.id"}  # vLLM's
    assert ours <= known
    assert len(ours) >= 14


def test_spans_hold_no_text(traced: TestClient, collector: Collector) -> None:
    traced.post("/v1/chat/completions", json=CHAT | {"stop": ["secret stop"], "user": "secret user"})
    assert "secret" not in repr(collector.wait_for(5))


def test_a_migration_shows_two_attempts(traced: TestClient, collector: Collector, engines: FakeEngines) -> None:
    second = [output([71], replica="r2", cached=4, timing=FIRST), output([72], "length", replica="r2", timing=LAST)]
    engines.scripts = [[output([70], timing=FIRST), ActorDiedError()], second]
    traced.post("/v1/chat/completions", json=CHAT | {"stream": True})
    spans = collector.wait_for(9)
    root = root_span(spans)
    attempts: defaultdict[int, list[Span]] = defaultdict(list)
    for span in child_spans(spans):
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
    root = root_span(collector.wait_for(1 + 4 * 4))  # each replica gives one token and is lost
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


def test_an_overloaded_replica_is_named(traced: TestClient, collector: Collector, engines: FakeEngines) -> None:
    error = OverloadedError("full")
    error.replica = "r1"
    engines.scripts = [[error]]
    assert traced.post("/v1/chat/completions", json=CHAT).status_code == 503
    spans = collector.wait_until(lambda: any(span.kind == SERVER for span in collector.spans))
    assert {span.name for span in child_spans(spans)} == {"route"}
    assert root_span(spans).status == ERROR
    assert root_span(spans).attributes["error.type"] == "overloaded"


def test_a_request_for_several_answers_shows_each(traced: TestClient, collector: Collector) -> None:
    traced.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2, "temperature": 1})
    spans = collector.wait_for(1 + 4 * 4)
    assert {span.attributes["pagoda.answer"] for span in child_spans(spans)} == {0, 1, 2, 3}
    assert root_span(spans).attributes["gen_ai.response.finish_reasons"] == ["stop"] * 4


def test_a_thousand_answers_do_not_make_thousands_of_spans(traced: TestClient, collector: Collector) -> None:
    traced.post("/v1/completions", json={"prompt": ["a"] * 100})
    spans = collector.wait_until(lambda: any(span.kind == SERVER for span in collector.spans))
    assert len(spans) == 1 + 16 * 4


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        (  # 0.1 s on the network between route and queue
            {"sent_at": 10.1, "first_token": 11.0, "last_token": 12.0, "timing": RequestTiming(0.3, 0.5, 0.9)},
            [("route", 10.0, 10.1), ("queue", 10.2, 10.5), ("prefill", 10.5, 11.0), ("decode", 11.0, 11.9)],
        ),
        (  # aborted: the engine has not reported how long it decoded
            {"sent_at": 10.1, "first_token": 11.0, "last_token": 12.0, "timing": RequestTiming(0.3, 0.5)},
            [("route", 10.0, 10.1), ("queue", 10.2, 10.5), ("prefill", 10.5, 11.0), ("decode", 11.0, 12.0)],
        ),
        (  # another router than ours: the time of its choice is unknown
            {"first_token": 11.0, "last_token": 11.0, "timing": RequestTiming(0.3, 0.5)},
            [("route", 10.0, 10.2), ("queue", 10.2, 10.5), ("prefill", 10.5, 11.0), ("decode", 11.0, 11.0)],
        ),
        (  # durations that cannot be: the clocks of two threads were read in another order
            {"sent_at": 10.9, "first_token": 11.0, "last_token": 11.0, "timing": RequestTiming(5.0, 0.5)},
            [("route", 10.0, 10.0), ("queue", 10.0, 10.5), ("prefill", 10.5, 11.0), ("decode", 11.0, 11.0)],
        ),
        ({"sent_at": 10.1}, [("route", 10.0, 10.1), ("queue", 10.1, 12.5)]),  # lost before its first token
        ({}, [("route", 10.0, 12.5)]),  # nowhere yet
    ],
)
def test_phases_are_laid_out_from_the_first_token(
    attempt: dict[str, Any], expected: list[tuple[str, float, float]]
) -> None:
    record = RequestRecord("id", "/v1/completions", ended=13.0)
    record.generations = (SimpleNamespace(attempts=[Dispatch(REQUEST, started=10.0, ended=12.5, **attempt)]),)  # type: ignore[assignment]
    laid_out = [(phase.name, phase.start, phase.end) for phase in phases(record)]
    assert [name for name, _, _ in laid_out] == [name for name, _, _ in expected]
    assert [times for _, *times in laid_out] == [pytest.approx(times) for _, *times in expected]


def test_tokens_that_arrive_together_have_the_engines_times(collector: Collector) -> None:
    attempt = Dispatch(REQUEST, started=time.monotonic() - 1.0)
    attempt.record(output([1, 2, 3], "stop", timing=RequestTiming(0.1, 0.2, 0.3)))
    assert attempt.first_token is not None
    assert attempt.last_token is not None
    assert attempt.last_token - attempt.first_token == pytest.approx(0.3)
