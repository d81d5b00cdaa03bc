"""The Messages API of the real server, with Anthropic's own client."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from tests.e2e.server import Server
from tests.waiting import HANG_S

MODEL = "pagoda-demo"
ASKED: Any = {
    "model": MODEL,
    "max_tokens": 40,
    "extra_body": {"temperature": 0},  # the client no longer has it, the API does
    "messages": [{"role": "user", "content": "What is a KV cache?"}],
}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Oslo", "東京"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
BILLING = "x-anthropic-billing-header"


@pytest.fixture
def api(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=HANG_S, max_retries=0) as client:
        yield client


def content(message: Message) -> list[dict[str, Any]]:
    """Return the content of a message without ids, which are random."""
    names = ("type", "text", "thinking", "name", "input")
    return [{name: getattr(block, name) for name in names if hasattr(block, name)} for block in message.content]


def test_whole_and_streamed_say_the_same(api: anthropic.Anthropic) -> None:
    whole = api.messages.create(**ASKED)
    assert whole.content[0].type == "text"
    assert whole.content[0].text
    assert whole._request_id == whole.id.removeprefix("msg_")
    with api.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == whole.content[0].text
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_counted_tokens_are_those_of_the_usage(api: anthropic.Anthropic) -> None:
    fields = {name: ASKED[name] for name in ("model", "messages")}
    usage = api.messages.create(**ASKED).usage
    counted = api.messages.count_tokens(**fields).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert api.messages.count_tokens(**fields, system="Be kind.").input_tokens > counted


def test_a_stop_sequence(api: anthropic.Anthropic) -> None:
    text = api.messages.create(**ASKED).content[0]
    assert text.type == "text"
    word = text.text.split()[3]
    stopped = api.messages.create(**ASKED, stop_sequences=["zzz", word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert stopped.content[0].type == "text"
    assert stopped.content[0].text == text.text[: text.text.index(word)]


def test_an_answer_continues_a_given_start(api: anthropic.Anthropic) -> None:
    text = api.messages.create(**ASKED).content[0]
    assert text.type == "text"
    start = " ".join(text.text.split(" ")[:4])
    messages = [*ASKED["messages"], {"role": "assistant", "content": start}]
    rest = api.messages.create(**ASKED | {"messages": messages}).content[0]
    assert rest.type == "text"
    assert (start + rest.text)[: len(text.text)] == text.text


def test_a_conversation_with_a_tool(api: anthropic.Anthropic) -> None:
    asked = ASKED | {"max_tokens": 120, "tools": [WEATHER], "tool_choice": {"type": "any"}}
    called = api.messages.create(**asked)
    with api.messages.stream(**asked) as stream:
        assert content(stream.get_final_message()) == content(called)
    assert called.stop_reason == "tool_use"
    call = called.content[0]
    assert call.type == "tool_use"
    assert call.name == "get_weather"
    assert call.input["city"] in ("Oslo", "東京")
    assert isinstance(call.input["days"], int)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny."}]}
    told: list[Any] = [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    asked |= {"messages": [*ASKED["messages"], *told], "tool_choice": {"type": "none"}}
    answer = api.messages.create(**asked)
    assert answer.content[0].type == "text"
    assert answer.stop_reason in ("end_turn", "max_tokens")


def test_an_answer_in_a_form(api: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"useful": {"type": "boolean"}}, "required": ["useful"]}
    schema["additionalProperties"] = False  # type: ignore[assignment]
    answer = api.messages.create(**ASKED, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert answer.content[0].type == "text"
    assert answer.content[0].text.replace(" ", "") in ('{"useful":true}', '{"useful":false}')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "error", "shown"),
    [
        ({"extra_body": {"temperature": 2}}, anthropic.BadRequestError, "temperature=2"),
        ({"model": "claude"}, anthropic.NotFoundError, "pagoda-demo"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, anthropic.BadRequestError, "context"),
        ({"system": "x" * 2**21}, anthropic.RequestTooLargeError, "1048576"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, anthropic.APIStatusError, "web_search"),
    ],
)
def test_errors(api: anthropic.Anthropic, fields: Any, error: type[Exception], shown: str, stream: bool) -> None:
    with pytest.raises(error) as caught:
        api.messages.create(**ASKED | fields, stream=stream)
    raised: Any = caught.value
    assert shown in raised.body["error"]["message"]
    assert raised.request_id == raised.body["request_id"]


def test_what_is_not_offered_is_not_retried(server: Server) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=2) as api:
        sent: list[Any] = []
        api._client.event_hooks = {"request": [sent.append]}
        with pytest.raises(anthropic.APIStatusError) as caught:
            api.messages.create(**ASKED | {"tools": [{"type": "computer_20250124", "name": "c"}]})
    assert (caught.value.status_code, len(sent)) == (501, 1)


def billing_line(name: str) -> str:
    """Return a line as Claude Code sends it, other in each request."""
    nonce = secrets.token_hex(3)[:5]
    return f"{name}: cc_version=2.1.177.{nonce[:3]}; cc_entrypoint=cli; cch={nonce};"


def cached_share(api: anthropic.Anthropic, line: Callable[[], str], num_requests: int = 6) -> float:
    """Return the share of cached prompt tokens in a conversation of Claude Code's shape, without its first request.

    Each request has the line as the first block of the system prompt, the instructions, and the conversation so far,
    in which the role ``system`` has messages too.
    """
    rules = f"You are an agent, session {secrets.token_hex(8)}. " + "Read a file before you edit it. " * 40
    messages: list[Any] = []
    cached = total = 0
    for number in range(num_requests):
        messages += [
            {"role": "user", "content": f"Question {number}: what is a KV cache?"},
            {"role": "system", "content": f"The user has opened file {number}."},
        ]
        system = [{"type": "text", "text": line()}, {"type": "text", "text": rules}]
        asked = {"model": MODEL, "max_tokens": 12, "system": system}
        answer = api.messages.create(**asked, messages=messages)  # type: ignore[call-overload]
        messages.append({"role": "assistant", "content": answer.content})
        if number:
            cached += answer.usage.cache_read_input_tokens
            total += answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    return float(cached / total)


def test_the_billing_header_costs_no_cache_hits(api: anthropic.Anthropic) -> None:
    stripped = cached_share(api, lambda: billing_line(BILLING))
    kept = cached_share(api, lambda: billing_line("x-unknown-header"))
    print(f"cached: {stripped:.1%} without the header, {kept:.1%} with it")
    assert stripped > 0.85
    assert kept < 0.1
