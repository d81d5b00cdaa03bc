"""The line that each request leaves in the log, and the engine's line every ten seconds."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from typing import Any

import pytest
from ray._common.formatters import JSONFormatter
from ray.exceptions import ActorDiedError
from starlette.testclient import TestClient

from deployments.api.asgi import RecordRequests
from deployments.config import LoggingOptions
from deployments.observability.recorder import Recorder
from deployments.observability.stats_line import StatsLine
from deployments.requests.log import RequestLog
from deployments.requests.record import RequestRecord
from deployments.routing.cluster_view import cluster_view
from engine.errors import OverloadedError
from engine.observability.metrics import (
    CACHE_HITS,
    CACHE_QUERIES,
    GENERATION_TOKENS,
    KV_USAGE,
    PROMPT_TOKENS,
    REQUESTS_RUNNING,
    REQUESTS_SWAPPED,
    REQUESTS_WAITING,
)
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import FakeEngines, output, waiting

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the cache"}]}
Log = list[logging.LogRecord]


def _lines(log: Log) -> list[str]:
    return [record.getMessage() for record in log if record.getMessage().startswith("request finished")]


def _fields(log: Log) -> dict[str, str]:
    """Return the only line's fields, as a reader of logfmt would."""
    (line,) = _lines(log)
    pairs = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S*)', line.removeprefix("request finished "))
    return {name: json.loads(value) if value.startswith('"') else value for name, value in pairs}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_leaves_one_line(client: TestClient, serve_log: Log, stream: bool) -> None:
    client.post("/v1/chat/completions", json=CHAT | {"stream": stream}, headers={"X-Request-Id": "abc-1"})
    fields = _fields(serve_log)
    assert list(fields) == [
        "id",
        "path",
        "replica",
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "ttft_ms",
        "e2e_ms",
        "reason",
        "status",
        "migrations",
    ]
    assert (fields["id"], fields["path"], fields["replica"]) == ("abc-1", "/v1/chat/completions", "r1")
    assert (fields["output_tokens"], fields["cached_tokens"], fields["migrations"]) == ("3", "0", "0")
    assert (fields["reason"], fields["status"]) == ("stop", "200")
    assert int(fields["prompt_tokens"]) > 3
    assert 0 < float(fields["ttft_ms"]) <= float(fields["e2e_ms"])


def test_cached_tokens_and_migrations_are_counted(client: TestClient, engines: FakeEngines, serve_log: Log) -> None:
    engines.scripts = [[output([70], cached=4), ActorDiedError()], [output([71], "length", replica="r2", cached=4)]]
    client.post("/v1/completions", json={"prompt": [5] * 9})
    fields = _fields(serve_log)
    assert (fields["prompt_tokens"], fields["cached_tokens"], fields["output_tokens"]) == ("9", "4", "2")
    assert (fields["migrations"], fields["replica"], fields["reason"]) == ("1", "r2", "length")


def test_several_answers_are_one_line(client: TestClient, serve_log: Log) -> None:
    client.post("/v1/completions", json={"prompt": [[5] * 4, [6] * 3], "n": 2, "temperature": 1})
    fields = _fields(serve_log)
    assert (fields["prompt_tokens"], fields["output_tokens"], fields["reason"]) == ("7", "12", "stop")


@pytest.mark.parametrize(
    ("body", "status", "reason", "param"),
    [
        ({"prompt": "a", "temperature": 9}, 400, "refused", "temperature"),
        ({}, 400, "refused", "prompt"),
        ({"prompt": "a", "model": "x\ny"}, 404, "model_not_found", "model"),
        ({"prompt": "a", "suffix": "x"}, 501, "error", "suffix"),
        ({"prompt": "a" * 4000}, 400, "refused", "prompt"),
    ],
)
def test_refusals_say_why(
    client: TestClient, serve_log: Log, body: dict[str, Any], status: int, reason: str, param: str
) -> None:
    assert client.post("/v1/completions", json=body).status_code == status
    fields = _fields(serve_log)
    assert (fields["status"], fields["reason"], fields["param"]) == (str(status), reason, param)
    assert (fields["replica"], fields["ttft_ms"], fields["output_tokens"]) == ("-", "-", "0")


def test_overload_is_logged_at_the_door_and_at_the_engine(
    client: TestClient, engines: FakeEngines, serve_log: Log
) -> None:
    error = OverloadedError("full")
    error.replica = "r7"
    engines.scripts = [[error]]
    client.post("/v1/completions", json={"prompt": "a"})
    fields = _fields(serve_log)
    assert (fields["status"], fields["reason"], fields["replica"]) == ("503", "overloaded", "r7")
    serve_log.clear()
    view = cluster_view(engines.deployment_name)
    view.set_replicas({"r1": {}})
    view.routing.report("r1", waiting(10_000, 0), now=time.monotonic())
    client.post("/v1/completions", json={"prompt": "a"})
    assert _fields(serve_log)["reason"] == "overloaded"


def test_an_error_in_mid_stream_is_not_a_success(client: TestClient, engines: FakeEngines, serve_log: Log) -> None:
    engines.scripts = [[output([70]), RuntimeError("secret detail")]]
    client.post("/v1/completions", json={"prompt": "a", "stream": True})
    fields = _fields(serve_log)
    assert (fields["status"], fields["reason"], fields["output_tokens"]) == ("500", "internal_error", "1")


def test_other_paths_leave_none(client: TestClient, serve_log: Log) -> None:
    for path in ("/health", "/v1/models", "/version", "/nothing"):
        assert client.get(path).headers["x-request-id"]
    client.get("/v1/completions")  # another method
    assert not _lines(serve_log)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_goes_away_is_an_abort(serve_log: Log, begun: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data", "more_body": True})
        raise asyncio.CancelledError

    async def nothing(*args: Any) -> None:
        """Nobody is there."""

    served = RecordRequests(app, on_end=RequestLog(LoggingOptions()).write)
    with pytest.raises(asyncio.CancelledError):
        await served({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, nothing, nothing)
    fields = _fields(serve_log)
    assert (fields["reason"], fields["status"]) == ("abort", "499")


async def test_a_server_below_a_prefix_logs_its_own_paths(serve_log: Log) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def nothing(*args: Any) -> None:
        """Nobody is there."""

    served = RecordRequests(app, on_end=RequestLog(LoggingOptions()).write)
    scope = {"type": "http", "method": "POST", "path": "/llm/v1/completions", "root_path": "/llm", "headers": []}
    await served(scope, nothing, nothing)
    assert _fields(serve_log)["path"] == "/v1/completions"


# --- ids -------------------------------------------------------------------------------------------------------------


def test_an_id_is_made_and_found_again(client: TestClient, serve_log: Log) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a"})
    made = answer.headers["x-request-id"]
    assert _fields(serve_log)["id"] == made
    assert answer.json()["id"] == f"cmpl-{made}"


@pytest.mark.parametrize("given", ["x" * 129, "a b", "caf\xe9", "a\x7f", "a\x1b[2J", ""])
def test_an_id_that_is_no_id_is_replaced(client: TestClient, serve_log: Log, given: str) -> None:
    headers = {b"x-request-id": given.encode("latin-1")}
    answer = client.post("/v1/completions", json={"prompt": "a"}, headers=headers)  # type: ignore[arg-type]
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])
    assert _fields(serve_log)["id"] == answer.headers["x-request-id"]


def test_an_id_cannot_forge_a_field(client: TestClient, serve_log: Log) -> None:
    given = 'a"status=200\\"=x'
    client.post("/v1/completions", json={}, headers={"X-Request-Id": given})
    fields = _fields(serve_log)
    assert (fields["id"], fields["status"]) == (given, "400")


# --- prompts ---------------------------------------------------------------------------------------------------------

EVIL = 'one\nINFO request finished id=forged\r\n\x1b[31m\x00\x7f \u2028 \x85 "quoted" caf\xe9'


def test_prompts_are_private(client: TestClient, serve_log: Log) -> None:
    for body in ({"prompt": "private"}, {"prompt": "private", "temperature": 9}, {"prompt": {"private": 1}}):
        client.post("/v1/completions", json=body)
    assert len(_lines(serve_log)) == 3
    assert "private" not in "".join(_lines(serve_log))


def test_a_prompt_that_is_asked_for_cannot_forge_a_line(open_client: OpenClient, serve_log: Log) -> None:
    client = open_client(logging={"prompts": True})
    client.post("/v1/completions", json={"prompt": EVIL})
    (line,) = _lines(serve_log)
    assert re.fullmatch(r"[\x20-\x7e]+", line)
    assert _fields(serve_log)["prompt"] == EVIL


@pytest.mark.parametrize("limit", [1, 10])
def test_a_prompt_is_cut(open_client: OpenClient, serve_log: Log, limit: int) -> None:
    client = open_client(logging={"prompts": True, "prompt_characters": limit})
    client.post("/v1/completions", json={"prompt": "the cache holds the keys"})
    assert _fields(serve_log)["prompt"] == "the cache holds the keys"[:limit]


def test_a_log_that_is_off_is_silent(open_client: OpenClient, serve_log: Log) -> None:
    client = open_client(logging={"requests": False, "prompts": True})
    assert client.post("/v1/completions", json={"prompt": "a"}).headers["x-request-id"]
    assert not _lines(serve_log)


# --- JSON ------------------------------------------------------------------------------------------------------------


def test_json_has_fields(open_client: OpenClient, serve_log: Log) -> None:
    client = open_client(logging={"encoding": "JSON", "prompts": True})
    client.post("/v1/completions", json={"prompt": EVIL}, headers={"X-Request-Id": "abc"})
    (record,) = [one for one in serve_log if one.getMessage() == "request finished"]
    line = JSONFormatter().format(record)  # what Serve uses
    assert "\n" not in line
    said = json.loads(line)
    assert (said["id"], said["engine_replica"], said["status"], said["output_tokens"]) == ("abc", "r1", 200, 3)
    assert (said["prompt"], said["message"]) == (EVIL, "request finished")
    assert isinstance(said["e2e_ms"], float)


def test_what_is_unknown_is_null(serve_log: Log) -> None:
    record = RequestRecord("abc", "/v1/completions", ended=time.monotonic())
    RequestLog(LoggingOptions(encoding="JSON")).write(record)
    said = json.loads(JSONFormatter().format(serve_log[0]))
    assert (said["ttft_ms"], said["engine_replica"]) == (None, None)


# --- the engine's line -----------------------------------------------------------------------------------------------


def test_the_stats_line_says_what_happened_since_the_last_one() -> None:
    recorder, now = Recorder(), [100.0]
    stats = StatsLine(recorder, clock=lambda: now[0])
    assert stats.line() is None  # nothing has happened yet
    recorder.increment(PROMPT_TOKENS, 500)
    recorder.increment(CACHE_QUERIES, 500)
    recorder.increment(CACHE_HITS, 400)
    recorder.increment(GENERATION_TOKENS, 123)
    for metric, value in ((REQUESTS_RUNNING, 3), (REQUESTS_WAITING, 2), (REQUESTS_SWAPPED, 1), (KV_USAGE, 0.456)):
        recorder.set(metric, value)
    now[0] += 10
    assert stats.line() == (
        "Avg prompt throughput: 50.0 tokens/s, Avg generation throughput: 12.3 tokens/s, Running: 3 reqs, "
        "Waiting: 3 reqs, KV cache usage: 45.6%, Prefix cache hit rate: 80.0%"
    )
    recorder.increment(GENERATION_TOKENS, 10)
    now[0] += 5
    second = stats.line()
    assert second is not None
    assert "prompt throughput: 0.0 tokens/s, Avg generation throughput: 2.0 tokens/s" in second
    assert "hit rate: 80.0%" in second  # of the last minute


def test_an_idle_engine_says_so_once() -> None:
    recorder, now = Recorder(), [0.0]
    stats = StatsLine(recorder, clock=lambda: now[0])
    recorder.increment(GENERATION_TOKENS, 10)
    lines = []
    for _ in range(8):
        now[0] += 10
        lines.append(stats.line())
    assert [line is not None for line in lines] == [True, True] + [False] * 6
    assert "generation throughput: 0.0 tokens/s, Running: 0 reqs" in str(lines[1])
    recorder.increment(CACHE_QUERIES, 10)
    recorder.increment(PROMPT_TOKENS, 10)
    now[0] += 10
    assert "hit rate: 0.0%" in str(stats.line())  # what was long ago does not count


def test_a_request_that_waits_is_not_idleness() -> None:
    recorder = Recorder()
    recorder.set(REQUESTS_WAITING, 1)
    stats = StatsLine(recorder, clock=time.monotonic)
    assert all(stats.line() is not None for _ in range(3))


def test_the_line_comes_from_a_thread(serve_log: Log) -> None:
    recorder = Recorder()
    stats = StatsLine(recorder, period_s=0.01)
    stats.start()
    recorder.increment(GENERATION_TOKENS, 5)
    deadline = time.monotonic() + 5
    while not serve_log:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stats.stop()
    assert serve_log[0].getMessage().startswith("Avg prompt throughput: ")


def test_a_request_without_a_key_leaves_its_reason(
    open_client: OpenClient, serve_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGODA_API_KEYS", "sixteen-and-more-characters")
    assert open_client().post("/v1/chat/completions", json=CHAT).status_code == 401
    fields = _fields(serve_log)
    assert (fields["status"], fields["reason"]) == ("401", "invalid_api_key")
