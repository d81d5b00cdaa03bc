"""Spans, request ids and log lines of a real server, which exports to a collector in this process."""

from __future__ import annotations

import re
import time
from typing import Any

import httpx
import pytest

from tests.deployments.collector import SERVER, Collector, Span
from tests.e2e.server import Server
from tests.waiting import HANG_S, until

CALLER, CALLERS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = ["route", "queue", "prefill", "decode"]


def _spans_of(collector: Collector, trace: str, count: int) -> list[Span]:
    def spans() -> list[Span]:
        return [span for span in collector.spans if span.trace_id == trace]

    return until(lambda: spans() if len(spans()) >= count else None, f"{count} spans of the trace {trace}") or []


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_can_be_followed(server: Server, collector: Collector, stream: bool) -> None:
    trace = CALLER[:-1] + str(int(stream))
    headers = {"traceparent": f"00-{trace}-{CALLERS_SPAN}-01", "X-Request-Id": f"followed-{stream}"}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "What is a KV cache?"}], "stream": stream}
    sent = time.time_ns()
    url = f"{server.url}/v1/chat/completions"
    answer = httpx.post(url, json=body | {"max_tokens": 40, "ignore_eos": True}, headers=headers, timeout=HANG_S)
    assert answer.headers.get_list("x-request-id") == [f"followed-{stream}"]  # once
    spans = {span.name: span for span in _spans_of(collector, trace, 5)}
    root = spans.pop("chat pagoda-demo")
    assert (root.parent, root.kind, set(spans)) == (CALLERS_SPAN, SERVER, set(PHASES))
    at = root.start
    assert sent <= root.start <= root.end <= time.time_ns()
    for name in PHASES:
        assert spans[name].parent == root.span_id
        assert at <= spans[name].start <= spans[name].end <= root.end, name
        at = spans[name].end
    said = root.attributes
    assert said["gen_ai.usage.output_tokens"] == 40
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert said["pagoda.replica"] == answer.headers["x-pagoda-replica"]
    # The engine's time of 39 tokens; the span is shorter if the ingress sees the first token late, even with the last.
    decode_s = (spans["decode"].end - spans["decode"].start) / 1e9
    assert 0 <= decode_s <= 1.01 * said["gen_ai.latency.time_in_model_decode"]
    assert (spans["prefill"].end - spans["prefill"].start) / 1e9 == pytest.approx(
        said["gen_ai.latency.time_in_model_prefill"], rel=0.01
    )
    line = server.wait_for_line(f"id=followed-{stream} ")
    assert f"trace_id={trace}" in line
    assert f"replica={said['pagoda.replica']}" in line
    assert "output_tokens=40" in line
    assert "reason=length status=200" in line


def test_a_disconnected_client_is_logged_and_traced(server: Server, collector: Collector) -> None:
    """It is sent again if its answer ends before the client can leave."""
    body = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    for attempt in "12345":
        trace = attempt * 32
        headers = {"traceparent": f"00-{trace}-{CALLERS_SPAN}-01", "X-Request-Id": f"gone-{attempt}"}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=HANG_S) as stream:
            next(stream.iter_lines())
        line = server.wait_for_line(f"id=gone-{attempt} ")
        if "reason=abort" in line:
            break
    assert "reason=abort status=499" in line
    tokens = re.search(r"output_tokens=(\d+)", line)
    assert tokens is not None
    assert 0 < int(tokens[1]) < 1900
    root = next(span for span in _spans_of(collector, trace, 5) if span.kind == SERVER)
    assert root.attributes["error.type"] == "client_closed_request"


def test_missing_and_oversized_request_ids_are_replaced(server: Server) -> None:
    url, body = f"{server.url}/v1/completions", {"prompt": "a", "max_tokens": 1}
    new_id = httpx.post(url, json=body, timeout=HANG_S).headers["x-request-id"]
    assert server.wait_for_line(f"id={new_id} ")
    answer = httpx.post(url, json=body, headers={"X-Request-Id": "x" * 500}, timeout=HANG_S)
    ours = answer.json()["id"].removeprefix("cmpl-")
    assert ours in answer.headers["x-request-id"]
    assert server.wait_for_line(f"id={ours} ")
    assert "x" * 500 not in server.log.read_text()


@pytest.mark.long
def test_an_engine_logs_its_throughput(public_server: Server) -> None:
    body = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True}
    start = len(public_server.log.read_text())
    httpx.post(f"{public_server.url}/v1/completions", json=body, headers=public_server.headers, timeout=HANG_S)
    line = public_server.wait_for_line("Avg prompt throughput", start=start)
    assert re.search(r"Avg generation throughput: [\d.]+ tokens/s, Running: \d+ reqs, Waiting: \d+ reqs", line)
    assert re.search(r"KV cache usage: [\d.]+%, Prefix cache hit rate: [\d.]+%", line)
