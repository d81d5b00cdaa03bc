"""Figures computed from clients' times, and the commands of stock load generators."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.completions import Outcome, complete, connected
from benchmarks.serving.load_generators import aiperf_command, aiperf_figures, guidellm_command, guidellm_figures
from benchmarks.serving.measures import gaps_of
from benchmarks.serving.server import Server
from tests.deployments.cli.fake_server import fake_server
from tests.ports import free_port

TARGET = ("program", "http://host:1", "model-dir", "name")


def _stream(sent: float, arrivals: list[float]) -> Outcome:
    return Outcome(200, sent, arrivals_s=arrivals, tokens=len(arrivals))


async def test_a_completion_says_when_tokens_came_and_how_it_ended() -> None:
    body = {"prompt": [1, 2], "max_tokens": 3}
    with fake_server() as server, connected(server.url) as target:
        server.deltas = [["a", "b", "c"], ["d"]]
        outcome = await complete(target, body)
        assert (outcome.succeeded, outcome.status, outcome.tokens) == (True, 200, 3)
        assert len(outcome.arrivals_s) == 3
        assert 0 < outcome.first_token_s == outcome.arrivals_s[0] <= outcome.arrivals_s[-1] <= outcome.total_s
        assert (await complete(target, body)).succeeded  # over the same connection
        server.status = 503
        refused = await complete(target, body)
        assert (refused.succeeded, refused.status, refused.error) == (False, 503, "503")
    with connected(f"http://127.0.0.1:{free_port()}") as target:
        lost = await complete(target, body)
        assert (lost.succeeded, lost.status, lost.error) == (False, 0, "ConnectionRefusedError")


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_the_server_under_test_is_not_asked_through_a_proxy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'# TYPE n gauge\nn{replica="a"} 2\nn{replica="b"} 3\n')

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked: Any = Server(f"http://127.0.0.1:{server.server_port}", None, None)  # type: ignore[arg-type]
        assert (asked.metric("n"), asked.metric_by_replica("n")) == (5.0, {"a": 2.0, "b": 3.0})
        server.shutdown()


def test_gaps_during_the_long_prompt_are_separated() -> None:
    long = Outcome(200, sent=10.0, first_token_s=1.0)  # computed from 10 to 11
    streams = [_stream(9.0, [0.1, 0.2, 0.3, 2.0, 2.1, 2.2]), _stream(9.0, [0.5, 0.6, 1.9, 2.0])]
    gaps = gaps_of(streams, long)
    assert (gaps.streams, gaps.long_ttft_s, gaps.failed) == (2, 1.0, 0)
    assert (gaps.p50_ms, gaps.max_ms) == (700.0, 1700.0)  # of 1.7, 1.3 and, beside its end, twice 0.1 seconds
    assert gaps.calm_p50_ms == 100.0


def test_calm_gaps_may_be_missing() -> None:
    gaps = gaps_of([_stream(10.2, [0.1, 0.2])], Outcome(200, sent=10.0, first_token_s=1.0))
    assert gaps.p50_ms == 100.0
    assert gaps.calm_p50_ms != gaps.calm_p50_ms  # not a number


def test_streams_that_end_too_early_raise_an_error() -> None:
    with pytest.raises(RuntimeError, match="--gap-tokens"):
        gaps_of([_stream(9.0, [0.1, 0.2])], Outcome(200, sent=10.0, first_token_s=1.0))


def _distribution(p50: float, p99: float) -> dict[str, Any]:
    return {"successful": {"mean": 0.0, "percentiles": {"p50": p50, "p99": p99}}}


def test_reports_of_both_generators_give_the_same_figures() -> None:
    metrics = {
        "output_tokens_per_second": {"successful": {"mean": 12.345}},
        "time_to_first_token_ms": _distribution(1.0, 2.0),
        "inter_token_latency_ms": _distribution(3.0, 4.0),
        "request_totals": {"successful": 5, "errored": 1, "incomplete": 1},
    }
    figures = guidellm_figures({"benchmarks": [{"metrics": metrics}]})
    other = {
        "output_token_throughput": {"avg": 12.345},
        "time_to_first_token": {"p50": 1.0, "p99": 2.0},
        "inter_token_latency": {"p50": 3.0, "p99": 4.0},
        "request_count": {"avg": 5.0},
        "error_request_count": {"avg": 2.0},
    }
    assert figures == aiperf_figures(other)
    assert figures["output_tokens_per_s"] == pytest.approx(12.35, abs=0.01)


def test_commands_name_server_model_and_tokenizer() -> None:
    for command in (guidellm_command(*TARGET, Path("r.json")), aiperf_command(*TARGET, Path("dir"))):
        line = " ".join(command)
        assert line.startswith("program ")
        assert all(part in line for part in ("http://host:1", "model-dir", "name"))
