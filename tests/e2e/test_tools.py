"""Tool calls against the real server, with the official client: the demo model is made to call by the grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.conftest import Server

MODEL = "pagoda-demo"
CITY = {"type": "string", "enum": ["Oslo", "Zürich", "東京"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"City": CITY},
        },
    },
}
PING = {
    "type": "function",
    "function": {
        "name": "ping",
        "strict": True,
        "parameters": {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
    },
}
ASKED: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
    "tools": [WEATHER, PING],
    "max_tokens": 120,
    "seed": 3,
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
def api(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        yield client


def _check(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "ping":
        assert arguments == {}
        return
    assert call.function.name == "get_weather"
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in CITY["enum"]
    assert 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_forced_calls_whole_and_streamed(api: openai.OpenAI, choice: Any, temperature: float) -> None:
    asked = ASKED | {"tool_choice": choice, "temperature": temperature, "parallel_tool_calls": False}
    whole = api.chat.completions.create(**asked).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    _check(call)
    with api.chat.completions.stream(**asked) as stream:
        names = [event.name for event in stream if event.type == "tool_calls.function.arguments.done"]
        streamed = stream.get_final_completion().choices[0]
    assert names == [call.function.name]
    assert (streamed.finish_reason, streamed.message.content or "") == ("tool_calls", "")
    assert streamed.message.tool_calls is not None
    (same,) = streamed.message.tool_calls
    assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)
    assert same.id.startswith("call_")


def test_a_conversation_with_calls_goes_on(api: openai.OpenAI) -> None:
    call = api.chat.completions.create(**ASKED, tool_choice=NAMED, temperature=0).choices[0].message
    assert call.tool_calls is not None
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "Sunny."}
    messages = [*ASKED["messages"], call.model_dump(exclude_none=True), result]
    answer = api.chat.completions.create(**ASKED | {"messages": messages}, tool_choice="none").choices[0]
    assert answer.message.tool_calls is None
    assert answer.message.content is not None
    assert answer.finish_reason in ("stop", "length")


def test_the_demo_model_cannot_choose(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_parser"):
        api.chat.completions.create(**ASKED)


def test_a_bad_schema_names_the_tools(api: openai.OpenAI) -> None:
    bad = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "x"}}}},
    }
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            api.chat.completions.create(**ASKED | {"tools": [bad], "tool_choice": "required", "stream": stream})
        assert caught.value.param == "tools"
