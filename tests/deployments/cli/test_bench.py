"""`pagoda bench`: in a pseudo-terminal with a fake server, its workloads and its figures."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.cli.bench.http import HttpTarget, Outcome
from deployments.cli.bench.load import Run, run_load
from deployments.cli.bench.report import figures, parse_slo
from deployments.cli.bench.sse import SseReader
from deployments.cli.bench.trace import read_trace
from deployments.cli.bench.workload import (
    Generated,
    Length,
    Session,
    Workload,
    generated,
    of_file,
    of_trace,
    parse_length,
)
from engine.errors import ConfigError
from tests.deployments.cli.fake_server import FakeServer
from tests.deployments.cli.terminal import Terminal, run


def _run(fake: FakeServer, workload: Workload, **options: Any) -> Run:
    async def main() -> Run:
        return await run_load(HttpTarget(fake.url, fake.key or None, 30.0), workload.sessions, "fake", **options)

    return asyncio.run(main())


# --- in a terminal ----------------------------------------------------------------------------------------------------


def test_a_run_in_a_terminal(fake: FakeServer, tmp_path: Path) -> None:
    fake.key = "a-key-of-16-characters"
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    options = ["--requests", "6", "--concurrency", "2", "--slo", "ttft=60000", "--out", str(out), "--plot", str(plot)]
    code, text = run("bench", fake.url, *options, environment={"PAGODA_API_KEY": fake.key})
    assert code == 0, text
    for part in ("6 of 6 complete", "80.0% of them cached", "(100.0%) within ttft 60000 ms", "us of CPU a token"):
        assert part in text
    result = json.loads(out.read_text())
    assert (result["requests"], result["output_tokens"], result["prompt_tokens"]) == (6, 18, 240)
    assert result["client"]["cpu_us_per_token"] > 0
    curves = [item.get("points", "") for item in ElementTree.parse(plot).iter() if item.tag.endswith("polyline")]
    assert len(curves) == 4
    assert all(len(points.split()) > 1 for points in curves[:3])


def test_errors_by_code_and_the_exit_code(fake: FakeServer) -> None:
    fake.status = 503
    code, text = run("bench", fake.url, "--requests", "3")
    assert code == 1
    assert "0 of 3 complete" in text
    assert "3 503" in text


def test_an_interrupted_run_reports_what_it_has_measured(fake: FakeServer, tmp_path: Path) -> None:
    fake.deltas = [["a", "b"], *([str(number) for number in range(2000)] for _ in range(9))]
    fake.pause_s = 0.02
    options = ["--requests", "10", "--concurrency", "1", "--out", str(tmp_path / "o")]
    with Terminal("bench", fake.url, *options) as terminal:
        terminal.wait_for("1/10")
        terminal.interrupt()
        assert terminal.wait() == 130
    assert "1 of 1 complete" in terminal.text
    assert json.loads((tmp_path / "o").read_text())["interrupted"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slo", "ttft"], "--slo='ttft' is not a limit; give milliseconds of ttft, tpot or e2e, such as ttft=500"),
        (["--prompt-tokens", "9:4"], "tokens='9:4' is not a length; give a number, or a range as 50:200"),
        (["--rate", "1", "--concurrency", "1"], "--rate and --concurrency exclude each other; give one of them"),
        (["--file", "none.jsonl"], "FILE='none.jsonl' cannot be read (No such file or directory); give a JSONL file"),
    ],
)
def test_wrong_options(options: list[str], message: str, fake: FakeServer) -> None:
    assert run("bench", fake.url, *options) == (1, f"pagoda: {message}\n")


# --- the client -------------------------------------------------------------------------------------------------------

EVENTS = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"reasoning_content": "hm"}}]},
    {"choices": [{"delta": {"content": "ü – 模\n\ndata: {"}}]},
    {"choices": [{"text": "x", "token_ids": [5, 6]}]},
    {"choices": [{"text": "", "finish_reason": "stop"}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}},
    },
]
BODY = b"".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode() for event in EVENTS) + b"data: [DONE]\n\n"


@given(st.data())
def test_a_stream_that_is_cut_anywhere(data: st.DataObject) -> None:
    """However the body is cut into chunks, and the bytes into reads, the same events come; times are those of reads."""
    rng = data.draw(st.randoms(use_true_random=False))
    chunks = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in _cut(BODY, rng)) + b"0\r\n\r\n"
    reader = SseReader()
    for number, part in enumerate(_cut(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks, rng)):
        assert not reader.is_done
        reader.feed(part, float(number))
    assert reader.is_complete
    assert reader.error_code == ""
    assert (reader.prompt_tokens, reader.cached_tokens, reader.num_tokens) == (9, 4, 7)
    assert len(reader.arrivals) == 3
    assert list(reader.arrivals) == sorted(reader.arrivals)
    assert reader.token_ids == [5, 6]


def _cut(data: bytes, rng: random.Random) -> list[bytes]:
    places = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(rng.randrange(9)))})
    return [data[start:end] for start, end in pairwise(places)]


def test_a_body_that_ends_with_its_connection() -> None:
    reader = SseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + BODY, 1.0)
    assert not reader.is_done
    reader.end_of_connection()
    assert reader.is_complete


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({"error": {"code": "replica_lost", "message": "m"}}, "replica_lost"),
        ({"error": {"type": "server_error"}}, "server_error"),
        ({"error": "text"}, "text"),
    ],
)
def test_an_error_in_a_stream(event: dict[str, Any], code: str) -> None:
    reader = SseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\n\r\n" + f"data: {json.dumps(event)}\n\n".encode(), 1.0)
    reader.end_of_connection()
    assert reader.error_code == code


def test_what_the_client_sees_of_failures(fake: FakeServer) -> None:
    sessions = generated(Generated(Length(4, 4), Length(3, 3)), 1, seed=0)
    fake.breaks_off = True
    assert [outcome.error for outcome in _run(fake, sessions, concurrency=1).outcomes] == ["incomplete"]

    async def send(url: str, timeout_s: float) -> Outcome:
        return await HttpTarget(url, None, timeout_s).send("/v1/completions", {"stream": True})

    assert asyncio.run(send("http://127.0.0.1:9", 30.0)).error == "ConnectionRefusedError"
    fake.breaks_off, fake.pause_s = False, 60.0
    assert asyncio.run(send(fake.url, 0.2)).error == "timeout"
    fake.pause_s = 0.0


def test_connections_are_kept(fake: FakeServer) -> None:
    _run(fake, generated(Generated(Length(4, 4), Length(3, 3)), 9, seed=0), concurrency=2)
    assert len(fake.requests) == 9
    assert len(fake.clients) == 2


# --- workloads --------------------------------------------------------------------------------------------------------


def test_turns_continue_the_answer_and_prefixes_are_shared(fake: FakeServer) -> None:
    shape = Generated(Length(4, 4), Length(3, 3), num_prefixes=2, prefix_tokens=8, turns=2)
    _run(fake, generated(shape, 4, seed=1), concurrency=1)
    prompts = [body["prompt"] for _, body in fake.requests]
    assert [len(prompt) for prompt in prompts] == [12, 19] * 4
    assert all(later[:15] == [*first, 100, 101, 102] for first, later in zip(prompts[::2], prompts[1::2], strict=True))
    beginnings = [tuple(prompt[:8]) for prompt in prompts[::2]]
    assert beginnings[0] == beginnings[2] != beginnings[1] == beginnings[3]
    assert all(body["ignore_eos"] and body["max_tokens"] == 3 for _, body in fake.requests)
    assert list(generated(shape, 4, seed=1).sessions) == list(generated(shape, 4, seed=1).sessions)


def _lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_trace_keeps_its_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    first = {"timestamp": 5000, "input_length": 1100, "output_length": 10, "hash_ids": [1, 2, 3]}
    second = {"timestamp": 3000, "input_length": 1030, "output_length": 20, "hash_ids": [1, 2]}
    path = _lines(tmp_path / "trace", first, second)
    early, late = of_trace(path, scale=0.5, speed=2.0, number=None).sessions
    assert (early.at_s, late.at_s) == (0.0, 1.0)
    assert (early.body["max_tokens"], late.body["max_tokens"]) == (10, 5)
    assert (len(early.body["prompt"]), len(late.body["prompt"])) == (515, 550)
    assert early.body["prompt"][:512] == late.body["prompt"][:512]
    assert early.body["prompt"][512:515] != late.body["prompt"][512:515]


def test_a_malformed_trace_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="request 1 is malformed"):
        read_trace(_lines(tmp_path / "trace", {"timestamp": 0}))
    with pytest.raises(ConfigError, match="line 2 is not a JSON object"):
        read_trace(_lines(tmp_path / "trace", {"timestamp": 0}, [1]))
    with pytest.raises(ConfigError, match="has no requests"):
        read_trace(_lines(tmp_path / "trace"))


def test_a_file_of_bodies(tmp_path: Path) -> None:
    chat, text = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}, {"prompt": "Hi", "temperature": 0}
    workload = of_file(_lines(tmp_path / "f", chat, text), speed=1.0, number=3, max_tokens=9)
    assert list(workload.sessions) == [
        Session("/v1/chat/completions", chat),
        Session("/v1/completions", text | {"max_tokens": 9}),
        Session("/v1/chat/completions", chat),
    ]
    path = _lines(tmp_path / "f", text | {"timestamp": 900}, text | {"timestamp": 400})
    timed = of_file(path, speed=5.0, number=None, max_tokens=9)
    assert timed.has_times
    assert [session.at_s for session in timed.sessions] == [0.0, 0.1]
    for wrong, message in (({"x": 1}, "neither or both"), (text | {"timestamp": 1}, "only some requests")):
        with pytest.raises(ConfigError, match=message):
            of_file(_lines(tmp_path / "f", text, wrong), speed=1.0, number=None, max_tokens=9)


def test_lengths() -> None:
    assert (parse_length("7"), parse_length("5:9")) == (Length(7, 7), Length(5, 9))


# --- figures ----------------------------------------------------------------------------------------------------------


def _outcome(sent: float, *arrivals: float, tokens: int, error: str = "") -> Outcome:
    end = arrivals[-1] if arrivals else sent
    return Outcome(sent, end, error, 10, 5, tokens, array("d", arrivals))


def test_the_figures_of_known_answers() -> None:
    outcomes = [
        _outcome(0.0, 0.1, 0.2, 0.3, tokens=3),
        _outcome(1.0, 1.4, 1.6, tokens=5),
        _outcome(1.0, 1.1, tokens=1, error="incomplete"),
        _outcome(1.0, tokens=0, error="503"),
    ]
    result = figures(Run(0.0, 2.0, outcomes, cpu_s=0.9e-3), parse_slo(["ttft=200", "tpot=100"]))
    assert (result["requests"], result["complete"], result["seconds"]) == (4, 2, 2.0)
    assert result["errors"] == {"incomplete": 1, "503": 1}
    assert (result["output_tokens_per_s"], result["hit_rate"]) == (4.0, 0.5)
    assert result["ttft_ms"]["mean"] == 250.0
    assert result["itl_ms"]["max"] == 200.0
    assert result["tpot_ms"]["mean"] == 75.0  # of 100 and 50
    assert result["e2e_ms"]["max"] == 600.0
    assert result["goodput"]["requests_per_s"] == 0.5
    assert result["client"]["cpu_us_per_token"] == 100.0  # the token of a failed answer was received, too


def test_the_figures_of_nothing() -> None:
    result = figures(Run(0.0, 1.0), parse_slo([]))
    assert (result["requests"], result["hit_rate"], result["ttft_ms"]) == (0, None, None)
