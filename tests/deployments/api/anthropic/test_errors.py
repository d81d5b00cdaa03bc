"""Errors outside the endpoints, keys and ids of requests: on the paths of the Messages API in its form."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve.exceptions import BackPressureError
from starlette.testclient import TestClient

from engine.errors import EngineDeadError
from tests.deployments.api.anthropic.sdk import checked_error
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import FakeEngines

KEY = "k" * 16
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
PATHS = ("/v1/messages", "/v1/messages/count_tokens")


@pytest.fixture
def guarded(open_client: OpenClient, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv("PAGODA_API_KEYS", KEY)
    return open_client()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("headers", [{}, {"X-Api-Key": "wrong"}, {"Authorization": "Bearer wrong"}])
def test_a_request_without_a_valid_key(guarded: TestClient, path: str, headers: dict[str, str]) -> None:
    answer = guarded.post(path, json=BODY, headers=headers)
    assert answer.status_code == 401
    error = checked_error(answer.json())
    assert error["type"] == "authentication_error"
    assert ("wrong" in error["message"]) is bool(headers)
    assert answer.headers["request-id"] == answer.json()["request_id"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/completions", "/v1/models", "/"])
@pytest.mark.parametrize(
    "headers",
    [
        {"X-Api-Key": KEY},
        {"X-Api-Key": KEY, "Authorization": "Bearer wrong"},
        {"X-Api-Key": "wrong", "Authorization": f"Bearer {KEY}"},
    ],
)
def test_a_key_in_either_header_counts_on_every_path(guarded: TestClient, path: str, headers: dict[str, str]) -> None:
    assert guarded.get(path, headers=headers).status_code != 401
    assert guarded.get(path, headers={"X-Api-Key": ""}).status_code == 401
    assert guarded.get(path, headers={b"X-Api-Key": b"k\xff" * 8}).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("DELETE", "/v1/messages/count_tokens", 405, "invalid_request_error"),
    ],
)
def test_unknown_paths_and_methods(client: TestClient, method: str, path: str, status: int, kind: str) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert checked_error(answer.json())["type"] == kind


def test_a_body_over_the_limit(client: TestClient) -> None:
    answer = client.post("/v1/messages", json=BODY | {"system": "x" * 2**16})
    assert answer.status_code == 413
    assert checked_error(answer.json())["type"] == "request_too_large"


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_can_be_retried(client: TestClient, engines: FakeEngines, stream: bool) -> None:
    engines.scripts = [[BackPressureError(num_queued_requests=1, max_queued_requests=1)]]
    answer = client.post("/v1/messages", json=BODY | {"stream": stream})
    assert answer.status_code == 503
    assert checked_error(answer.json())["type"] == "overloaded_error"
    assert int(answer.headers["retry-after"]) > 0
    assert "x-should-retry" not in answer.headers


def test_an_unexpected_error(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[RuntimeError("secret detail")]]
    answer = client.post("/v1/messages", json=BODY)
    assert answer.status_code == 500
    error = checked_error(answer.json())
    assert error["type"] == "api_error"
    assert "secret" not in error["message"]


def test_every_response_has_the_id_of_its_request(client: TestClient, engines: FakeEngines) -> None:
    for headers in ({}, {"X-Request-Id": "mine"}):
        answer = client.post("/v1/messages", json=BODY, headers=headers)
        assert answer.headers.get_list("request-id") == [headers.get("X-Request-Id", answer.headers["request-id"])]
        assert answer.json()["id"] == f"msg_{answer.headers['request-id']}"
    assert "request-id" not in client.get("/version").headers


def test_other_paths_keep_the_errors_of_the_openai_api(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[EngineDeadError("gone")]]
    for answer in (client.post("/v1/messagesx"), client.post("/v1/completions", json={"prompt": "a"})):
        assert set(answer.json()) == {"error"}
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
