"""The cases of the Open Responses specification's compliance tests that concern text, in our own words."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.deployments.api.responses.official import check_events, check_response, events_of

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "enum": ["Oslo", "Lima"]}},
        "required": ["location"],
        "additionalProperties": False,
    },
}


def message(role: str, text: str) -> dict[str, str]:
    """Return an item of an input."""
    return {"type": "message", "role": role, "content": text}


CASES: dict[str, dict[str, Any]] = {
    "basic": {"input": [message("user", "What is a KV cache?")]},
    "streaming": {"input": [message("user", "What is a KV cache?")], "stream": True},
    "system prompt": {"input": [message("system", "Answer briefly."), message("user", "What is a KV cache?")]},
    "multi-turn": {
        "input": [message("user", "Hi!"), message("assistant", "Hello."), message("user", "What is a KV cache?")]
    },
    "tools": {"input": [message("user", "Weather?")], "tools": [TOOL], "tool_choice": "required"},
}
CASES["streamed tools"] = CASES["tools"] | {"stream": True}
CALL_EVENTS = {  # of a function_call that is streamed
    *("response.output_item.added", "response.function_call_arguments.delta"),
    *("response.function_call_arguments.done", "response.output_item.done"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_case(client: httpx.Client, name: str) -> None:
    body = {"model": "pagoda-demo", "temperature": 0, "max_output_tokens": 128} | CASES[name]
    answer = client.post("/v1/responses", json=body).raise_for_status()
    events = events_of(answer.text) if "stream" in body else []
    response = check_events(events) if events else answer.json()
    check_response(response)
    assert response["status"] == "completed"
    (item,) = response["output"]
    assert item["status"] == "completed"
    if "tools" in body:
        assert not events or {event["type"] for event in events} >= CALL_EVENTS
        assert (item["type"], item["name"]) == ("function_call", "get_weather")
        assert json.loads(item["arguments"])["location"] in ("Oslo", "Lima")
    else:
        assert (item["type"], item["role"]) == ("message", "assistant")
        assert item["content"][0]["text"]
