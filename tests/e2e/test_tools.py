"""Tool calls against the real server, with the official client: forced by the grammar, and of the model's own will."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from demo.tool_corpus import load_tool_corpus

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
CALCULATOR: Any = load_tool_corpus().page_tools[0]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


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


def test_the_model_calls_by_itself_and_answers_with_the_result(api: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is 12 * 34?"}]
    asked: Any = {"model": MODEL, "messages": messages, "tools": [CALCULATOR], "temperature": 0}
    called = api.chat.completions.create(**asked).choices[0]
    assert (called.finish_reason, called.message.content) == ("tool_calls", None)
    assert called.message.tool_calls is not None
    (call,) = called.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("calculator", {"expression": "12 * 34"})
    with api.chat.completions.stream(**asked) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == ""
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls is not None
    assert [again.function.arguments for again in streamed.message.tool_calls] == [call.function.arguments]

    result = {"role": "tool", "tool_call_id": call.id, "content": '{"result": 408}'}
    asked["messages"] = [*messages, called.message.model_dump(exclude_none=True), result]
    answer = api.chat.completions.create(**asked).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("stop", "12 * 34 = 408.")


def test_the_model_answers_without_a_call_if_it_needs_none(api: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "What is a KV cache?"}], "temperature": 0}
    plain = api.chat.completions.create(**asked).choices[0].message
    offered = api.chat.completions.create(**asked, tools=[CALCULATOR]).choices[0].message
    assert offered.tool_calls is None
    assert offered.content == plain.content


def test_the_model_thinks_before_it_calls(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 12 * 34?"}],
        tools=[CALCULATOR],
        temperature=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    ).choices[0]
    assert answer.message.model_extra is not None
    assert answer.message.model_extra["reasoning"]
    assert answer.message.content is None
    assert answer.message.tool_calls is not None
    assert answer.message.tool_calls[0].function.name == "calculator"


def test_a_bad_schema_names_the_tools(api: openai.OpenAI) -> None:
    bad = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "x"}}}},
    }
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            api.chat.completions.create(**ASKED | {"tools": [bad], "tool_choice": "required", "stream": stream})
        assert caught.value.param == "tools"
