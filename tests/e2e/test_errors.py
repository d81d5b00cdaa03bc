"""Rejected requests: status code, error body, and no path of the server in the message.

tests/deployments/api/openai/test_rejected_requests.py has many more, without a server.
"""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}}
# Each is found by another part: the API, the tokenizer, the engine's limits, the compiler of grammars.
REJECTED = [
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "0"),
    ("completions", {"prompt": "word " * 9000}, 400, "prompt", "context"),
    ("completions", {"prompt": "a", "model": "gpt-4"}, 404, "model", "gpt-4"),
    ("chat/completions", CHAT | SCHEMA, 400, "response_format", "cannot be compiled"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "shown"), REJECTED)
@pytest.mark.parametrize("stream", [False, True])
def test_the_error_names_the_parameter_and_its_value(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, param: str, shown: str, stream: bool
) -> None:
    answer = client.post(f"/v1/{path}", json=body | {"stream": stream})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert shown in error["message"]
    assert not re.search(r"/[\w.-]+/", error["message"].replace("/v1/", ""))


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"",
        b"[]",
        b'"x"',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "top_p": Infinity}',
        b"\xff",
        b"[" * 100_000,
        b'{"prompt": "\\ud800"}',
    ],
)
def test_an_invalid_json_body(client: httpx.Client, content: bytes) -> None:
    answer = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_another_content_type(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400
    assert "text/plain" in answer.json()["error"]["message"]


def test_a_body_over_the_limit(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "x" * 2**21})
    assert answer.status_code == 413
    assert "1048576" in answer.json()["error"]["message"]


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    for answer, status in ((client.post("/v1/moderations", json={}), 404), (client.get("/v1/completions"), 405)):
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


def test_unknown_fields_are_ignored(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=CHAT | {"metadata": {"a": 1}, "frobnicate": 7, "user": "me"})
    assert answer.status_code == 200
