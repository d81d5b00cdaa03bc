"""/invocations answers what chat or completions answer, by the fields of the body."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.deployments.fakes import events

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the cache"}], "request_id": "same"}
COMPLETION: dict[str, Any] = {"prompt": "the cache", "request_id": "same"}


def _without_time(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"created": 0}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)], ids=["chat", "completion"]
)
def test_the_answer_is_that_of_the_endpoint(client: TestClient, path: str, body: dict[str, Any]) -> None:
    direct, invoked = client.post(path, json=body), client.post("/invocations", json=body)
    assert invoked.status_code == 200
    assert _without_time(invoked.json()) == _without_time(direct.json())
    streams = [client.post(url, json=body | {"stream": True}).text for url in (path, "/invocations")]
    assert [_without_time(event) for event in events(streams[0])] == [
        _without_time(event) for event in events(streams[1])
    ]
    assert streams[1].endswith("data: [DONE]\n\n")


def test_what_is_neither_is_refused(client: TestClient) -> None:
    answer = client.post("/invocations", json={"inputs": "the cache"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "messages or prompt is missing; give one of them"
    assert client.post("/invocations", json=COMPLETION | {"top_p": 3}).json()["error"]["param"] == "top_p"
    assert client.post("/invocations", json=COMPLETION | {"model": "other"}).status_code == 404
