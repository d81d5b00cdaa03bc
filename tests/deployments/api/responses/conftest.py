"""Creating responses, whole and streamed, with everything that comes back checked against the official types."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.ingress import Ingress
from tests.deployments.api.responses.official import check_events, check_response, events_of
from tests.deployments.fakes import INFO

PATH = "/v1/responses"


def post(client: TestClient, **body: Any) -> dict[str, Any]:
    """Return the response to a body, which is the same whole and streamed."""
    answer = client.post(PATH, json={"input": "Hi"} | body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    check_response(whole)
    streamed = check_events(stream(client, **body))
    assert comparable(streamed) == comparable(whole)
    return whole


def create(client: TestClient, **body: Any) -> dict[str, Any]:
    """Return the response to a body that is not streamed."""
    answer = client.post(PATH, json={"input": "Hi"} | body)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    check_response(response)
    return response


def stream(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a streamed response."""
    answer = client.post(PATH, json={"input": "Hi"} | body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text)


def comparable(value: Any) -> Any:
    """Return a response without ids and times."""
    if isinstance(value, list):
        return [comparable(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: comparable(item)
        for key, item in value.items()
        if key not in ("id", "call_id", "created_at", "completed_at", "previous_response_id")
    }


def rejected(client: TestClient, status: int = 400, **body: Any) -> dict[str, Any]:
    """Return the error to a body."""
    answer = client.post(PATH, json={"input": "Hi"} | body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.fixture(autouse=True)
def ingresses(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ingresses of the test, which find each other."""
    ingresses: list[Any] = []
    build = Ingress.__serve_build_asgi_app__

    def recording_build(self: Ingress) -> Any:
        ingresses.append(self)
        return build(self)

    async def first_result(handle: object, method: str, *args: Any) -> Any:
        results = [await getattr(ingress, method)(*args) for ingress in ingresses]
        return next((result for _, result in results if result is not None), None)

    monkeypatch.setattr(Ingress, "__serve_build_asgi_app__", recording_build)
    monkeypatch.setattr("deployments.serve.replicas.first_result", first_result)
    monkeypatch.setattr("deployments.serve.replicas.all_ingresses", lambda: None)
    monkeypatch.setattr("deployments.ingress._name", lambda: "ingress")
    return ingresses


@pytest.fixture(autouse=True)
def long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's context holds the prompts of conversations with tools."""
    monkeypatch.setattr("tests.deployments.fakes.INFO", replace(INFO, max_model_len=1024, num_blocks=512))
