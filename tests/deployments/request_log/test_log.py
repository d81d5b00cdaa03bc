"""The log line of each request."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from typing import Any, cast

import pytest
from ray._common.formatters import JSONFormatter
from ray.exceptions import ActorDiedError
from starlette.testclient import TestClient

from deployments.api.middleware import RecordRequests
from deployments.config import LoggingOptions
from deployments.request_log.log import RequestLog
from deployments.request_log.record import RequestRecord, current_record
from deployments.requests.generation import Generation
from deployments.routing.cluster_view import cluster_view
from engine.errors import OverloadedError
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import FakeEngines, output, waiting
from tests.waiting import HANG_S

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


def test_a_prompt_counts_once_however_many_answers_are_generated(
    client: TestClient, engines: FakeEngines, serve_log: Log
) -> None:
    engines.scripts = [[output([70, 71], "stop", cached=2, logprobs=[-1.0, -1.0])]]
    client.post("/v1/completions", json={"prompt": [[5] * 4, [6] * 3], "n": 1, "best_of": 3, "temperature": 1})
    fields = _fields(serve_log)
    assert (fields["prompt_tokens"], fields["cached_tokens"], fields["output_tokens"]) == ("7", "4", "12")


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


def test_overload_of_the_ingress_and_of_an_engine_is_logged(
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
    view.routing.report("r1", waiting(10_000, 0), now=time.monotonic() + HANG_S)  # it does not expire
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
async def test_a_client_that_disconnects_is_an_abort(serve_log: Log, begun: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data", "more_body": True})
        raise asyncio.CancelledError

    async def nothing(*args: Any) -> None:
        """Receive and send nothing."""

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
        """Receive and send nothing."""

    served = RecordRequests(app, on_end=RequestLog(LoggingOptions()).write)
    scope = {"type": "http", "method": "POST", "path": "/llm/v1/completions", "root_path": "/llm", "headers": []}
    await served(scope, nothing, nothing)
    assert _fields(serve_log)["path"] == "/v1/completions"


async def test_a_request_that_has_ended_holds_no_answers() -> None:
    """The HTTP server keeps the last request of each open connection."""
    seen = list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        current_record().generations, current_record().prompt = [cast(Generation, object())], "hello"

    def on_end(record: RequestRecord) -> None:
        seen.append(len(record.generations))
        raise ValueError("on_end fails")

    started = list[RequestRecord]()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await RecordRequests(app, on_end, started.append)(scope, None, None)  # type: ignore[arg-type]
    (record,) = started
    assert seen == [1]
    assert (record.generations, record.prompt) == ((), None)


# --- ids -------------------------------------------------------------------------------------------------------------


def test_a_generated_id_is_in_header_log_and_body(client: TestClient, serve_log: Log) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a"})
    request_id = answer.headers["x-request-id"]
    assert _fields(serve_log)["id"] == request_id
    assert answer.json()["id"] == f"cmpl-{request_id}"


@pytest.mark.parametrize(
    "given",
    ["x" * 129, "a b", "caf\xe9", "a\x7f", "a\x1b[2J", ""],
    ids=["long", "space", "accent", "delete", "escape", "empty"],
)
def test_an_invalid_id_is_replaced(client: TestClient, serve_log: Log, given: str) -> None:
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


def test_prompts_are_not_logged_by_default(client: TestClient, serve_log: Log) -> None:
    for body in ({"prompt": "private"}, {"prompt": "private", "temperature": 9}, {"prompt": {"private": 1}}):
        client.post("/v1/completions", json=body)
    assert len(_lines(serve_log)) == 3
    assert "private" not in "".join(_lines(serve_log))


def test_a_logged_prompt_cannot_forge_a_line(open_client: OpenClient, serve_log: Log) -> None:
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


def test_a_log_that_is_off_writes_nothing(open_client: OpenClient, serve_log: Log) -> None:
    client = open_client(logging={"requests": False, "prompts": True})
    assert client.post("/v1/completions", json={"prompt": "a"}).headers["x-request-id"]
    assert not _lines(serve_log)


# --- JSON ------------------------------------------------------------------------------------------------------------


def test_json_has_fields(open_client: OpenClient, serve_log: Log) -> None:
    client = open_client(logging={"encoding": "JSON", "prompts": True})
    client.post("/v1/completions", json={"prompt": EVIL}, headers={"X-Request-Id": "abc"})
    (record,) = [item for item in serve_log if item.getMessage() == "request finished"]
    line = JSONFormatter().format(record)  # what Serve uses
    assert "\n" not in line
    said = json.loads(line)
    assert (said["id"], said["engine_replica"], said["status"], said["output_tokens"]) == ("abc", "r1", 200, 3)
    assert (said["prompt"], said["message"]) == (EVIL, "request finished")
    assert isinstance(said["e2e_ms"], float)


def test_unknown_fields_are_null(serve_log: Log) -> None:
    record = RequestRecord("abc", "/v1/completions", ended=time.monotonic())
    RequestLog(LoggingOptions(encoding="JSON")).write(record)
    said = json.loads(JSONFormatter().format(serve_log[0]))
    assert (said["ttft_ms"], said["engine_replica"]) == (None, None)


def test_a_request_without_a_key_is_logged_with_the_reason(
    open_client: OpenClient, serve_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGODA_API_KEYS", "sixteen-and-more-characters")
    assert open_client().post("/v1/chat/completions", json=CHAT).status_code == 401
    fields = _fields(serve_log)
    assert (fields["status"], fields["reason"]) == ("401", "invalid_api_key")
