"""Spans, request ids and log lines of a real server, which exports to a collector in this process."""

from __future__ import annotations

import re
import time
from typing import Any

import httpx
import pytest

from tests.deployments.collector import SERVER, Collector, Span
from tests.e2e.conftest import Server

CALLER, CALLERS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = ["route", "queue", "prefill", "decode"]


def _spans_of(collector: Collector, trace: str, count: int) -> list[Span]:
    def found() -> list[Span]:
        return [span for span in collector.spans if span.trace_id == trace]

    collector.wait_until(lambda: len(found()) >= count)
    return found()


def _line(server: Server, text: str, timeout_s: float = 20.0, *, start: int = 0) -> str:
    """Wait for a line with ``text`` in the launcher's output after ``start`` characters, and return it."""
    deadline = time.monotonic() + timeout_s
    while True:
        for line in server.log.read_text()[start:].splitlines():
            if text in line:
                return line
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_can_be_followed(server: Server, collector: Collector, stream: bool) -> None:
    trace = CALLER[:-1] + str(int(stream))
    headers = {"traceparent": f"00-{trace}-{CALLERS_SPAN}-01", "X-Request-Id": f"followed-{stream}"}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "What is a KV cache?"}], "stream": stream}
    sent = time.time_ns()
    url = f"{server.url}/v1/chat/completions"
    answer = httpx.post(url, json=body | {"max_tokens": 40, "ignore_eos": True}, headers=headers, timeout=60)
    done = time.time_ns()
    assert answer.headers.get_list("x-request-id") == [f"followed-{stream}"]  # once
    spans = {span.name: span for span in _spans_of(collector, trace, 5)}
    root = spans.pop("chat pagoda-demo")
    assert (root.parent, root.kind, set(spans)) == (CALLERS_SPAN, SERVER, set(PHASES))
    at = root.start
    assert sent <= root.start <= root.end <= done + 1e9
    for name in PHASES:
        assert spans[name].parent == root.span_id
        assert at <= spans[name].start <= spans[name].end <= root.end, name
        at = spans[name].end
    said = root.attributes
    assert said["gen_ai.usage.output_tokens"] == 40
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert said["pagoda.replica"] == answer.headers["x-pagoda-replica"]
    # 39 tokens follow the first one. On a busy machine the ingress may see the first one late: the span is shorter.
    decode_s = (spans["decode"].end - spans["decode"].start) / 1e9
    assert said["gen_ai.latency.time_in_model_decode"] > 0.001
    assert 0 < decode_s <= 1.2 * said["gen_ai.latency.time_in_model_decode"]
    assert (spans["prefill"].end - spans["prefill"].start) / 1e9 == pytest.approx(
        said["gen_ai.latency.time_in_model_prefill"], rel=0.01
    )
    line = _line(server, f"id=followed-{stream} ")
    assert f"trace_id={trace}" in line
    assert f"replica={said['pagoda.replica']}" in line
    assert "output_tokens=40" in line
    assert "reason=length status=200" in line


def test_a_disconnected_client_is_logged_and_traced(server: Server, collector: Collector) -> None:
    trace = "1" * 32
    headers = {"traceparent": f"00-{trace}-{CALLERS_SPAN}-01", "X-Request-Id": "gone"}
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=60) as stream:
        next(stream.iter_lines())
    line = _line(server, "id=gone ")
    assert "reason=abort status=499" in line
    tokens = re.search(r"output_tokens=(\d+)", line)
    assert tokens is not None
    assert 0 < int(tokens[1]) < 900
    root = next(span for span in _spans_of(collector, trace, 5) if span.kind == SERVER)
    assert root.attributes["error.type"] == "client_closed_request"


def test_missing_and_oversized_request_ids_are_replaced(server: Server) -> None:
    url, body = f"{server.url}/v1/completions", {"prompt": "a", "max_tokens": 1}
    made = httpx.post(url, json=body, timeout=60).headers["x-request-id"]
    assert _line(server, f"id={made} ")
    answer = httpx.post(url, json=body, headers={"X-Request-Id": "x" * 500}, timeout=60)
    ours = answer.json()["id"].removeprefix("cmpl-")
    assert ours in answer.headers["x-request-id"]
    assert _line(server, f"id={ours} ")
    assert "x" * 500 not in server.log.read_text()


@pytest.mark.long
def test_an_engine_logs_its_throughput(public_server: Server) -> None:
    body = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True}
    start = len(public_server.log.read_text())
    httpx.post(f"{public_server.url}/v1/completions", json=body, headers=public_server.headers, timeout=60)
    line = _line(public_server, "Avg prompt throughput", start=start)
    assert re.search(r"Avg generation throughput: [\d.]+ tokens/s, Running: \d+ reqs, Waiting: \d+ reqs", line)
    assert re.search(r"KV cache usage: [\d.]+%, Prefix cache hit rate: [\d.]+%", line)
