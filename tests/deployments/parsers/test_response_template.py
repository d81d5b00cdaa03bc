"""Formats that the tokenizer describes: transformers' response templates, here as Gemma 4 would have it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.parsers.answer_parser import AnswerParser
from deployments.parsers.events import Event, Reasoning
from deployments.parsers.registry import RESPONSE_TEMPLATE, Parsers
from engine.errors import ConfigError
from tests.deployments.parsers.shapes import TOOLS, Shape, call, parse, text

TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|turn>model\n",
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>", "<eos>"], "content": "text"},
    },
}
CALL = "<|tool_call>call:f{a:1}<tool_call|>"
F = call("f", '{"a": 1}')
R: tuple[Event, ...] = (Reasoning("Hm."),)
THOUGHT = "<|channel>thought\nHm.<channel|>"
SHAPES = [
    Shape("text", "Hello\n", text("Hello\n")),
    Shape("end marker", "Hello<turn|>", text("Hello")),
    Shape("empty", "", ()),
    Shape("call", CALL, F),
    Shape("two calls", CALL + CALL, F + F),
    Shape("everything", f"{THOUGHT}Now: {CALL} ok<turn|>", R + text("Now:") + F + text("  ok")),
    Shape("unicode", CALL.replace("1", '"東京 🎉"'), call("f", '{"a": "東京 🎉"}')),
    Shape("nested", CALL.replace("1", '{"b":[1,{"c":null}]}'), call("f", '{"a": {"b": [1, {"c": null}]}}')),
    Shape("truncated thought", THOUGHT[:20], (Reasoning("Hm"),)),
    Shape("truncated marker", "a <|tool_c", text("a <|tool_c")),
    Shape("truncated call", CALL[: CALL.index("}")], text(CALL[: CALL.index("}")])),
    Shape("no end marker", CALL.removesuffix("<tool_call|>"), F),
    Shape(
        "arguments that are no object", "<|tool_call>call:f[1]<tool_call|>", text("<|tool_call>call:f[1]<tool_call|>")
    ),
    Shape("broken call", CALL.replace("1", "oops"), text(CALL.replace("1", "oops"))),
    Shape("text after a broken call", f"x {CALL.replace('1', '')} {CALL}", text(f"x {CALL.replace('1', '')} {CALL}")),
    Shape("angles", "a < b <| c", text("a < b <| c")),
]


def machine(*, has_tools: bool = True, prompt: str = "<|turn>model\n") -> AnswerParser:
    family = Parsers(RESPONSE_TEMPLATE, None, TEMPLATE).family(TOOLS if has_tools else None, prompt)
    assert family is not None
    return AnswerParser(family)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_whole_and_by_character(shape: Shape) -> None:
    assert parse(machine(), shape.text) == shape.events
    assert parse(machine(), *shape.text) == shape.events


@given(
    pieces=st.lists(st.sampled_from([*(shape.text for shape in SHAPES), "<|tool_call>", "{", "}", "x "]), max_size=6)
)
@settings(max_examples=60, deadline=None)
def test_random_text_however_it_is_cut(pieces: list[str]) -> None:
    assert parse(machine(), *pieces) == parse(machine(), "".join(pieces))


def test_the_prompt_may_open_reasoning() -> None:
    prompt = "<|turn>user\nx<|turn>model\n<|channel>thought\n"
    assert parse(machine(prompt=prompt), "Hm.<channel|>Hello") == (*R, *text("Hello"))


TAGGED = {
    "start_anchor": "<|turn>model\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call=(?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (TAGGED, "<call=f><a>12</a><zip>007</zip><n>null</n><x>1</x></call>"),
        (TEMPLATE, '<|tool_call>call:f{a:"12",zip:"007",n:"null",x:"1"}<tool_call|>'),
    ],
)
def test_arguments_have_the_types_of_their_schemas(template: dict[str, Any], answer: str) -> None:
    """Also behind references; what a schema does not limit stays as it is."""
    defs = {"Zip": {"type": "string"}, "Count": {"type": "integer"}}
    properties = {"a": {"$ref": "#/$defs/Count"}, "zip": {"$ref": "#/$defs/Zip"}, "n": {"type": ["object", "null"]}}
    family = Parsers(RESPONSE_TEMPLATE, None, template).family({"f": {"properties": properties, "$defs": defs}}, "")
    assert family is not None
    expected = call("f", '{"a": 12, "zip": "007", "n": null, "x": "1"}')
    assert parse(AnswerParser(family), answer) == expected


def test_a_number_where_only_text_is_allowed_becomes_text() -> None:
    family = Parsers(RESPONSE_TEMPLATE, None, TEMPLATE).family({"f": {"properties": {"a": {"type": "string"}}}}, "")
    assert family is not None
    assert parse(AnswerParser(family), CALL) == call("f", '{"a": "1"}')


@pytest.mark.parametrize(
    ("listed", "expected"), [(["1", 2], '"1"'), ([1, "2"], "1"), ([1, "1"], "1"), (["1", "2"], '"1"'), ([1.0], "1")]
)
def test_listed_values_tell_what_is_meant(listed: list[Any], expected: str) -> None:
    family = Parsers(RESPONSE_TEMPLATE, None, TEMPLATE).family({"f": {"properties": {"a": {"enum": listed}}}}, "")
    assert family is not None
    assert parse(AnswerParser(family), CALL) == call("f", f'{{"a": {expected}}}')


def test_the_template_is_chosen_if_no_format_of_ours_is_known() -> None:
    assert Parsers.choose("", None, None, TEMPLATE) == Parsers(RESPONSE_TEMPLATE, None, TEMPLATE)
    assert Parsers.choose("<tool_call>", None, None, TEMPLATE) == Parsers("hermes", None)
    assert Parsers.choose("<tool_call>", RESPONSE_TEMPLATE, None, TEMPLATE).template == TEMPLATE
    assert Parsers.choose("", "none", "none", TEMPLATE) == Parsers()
    with pytest.raises(ConfigError, match="no response template"):
        Parsers.choose("", RESPONSE_TEMPLATE, None, None)
