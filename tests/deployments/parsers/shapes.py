"""Shapes of answers: for each format of tool calls, texts and the events that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deployments.parsers.answer_parser import AnswerParser
from deployments.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from deployments.parsers.registry import Parsers

__all__ = ["ARGUMENTS", "TOOLS", "Shape", "arguments_shapes", "call", "parse", "parser", "text"]

TOOLS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
            "tags": {"type": "array"},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "size": {"type": ["number", "string"]},
            "code": {"enum": ["x", "y"]},
        },
    },
    "ping": {},
    "run": {"type": "object", "properties": {"code": {"type": "string"}}},
    "wait": {"type": "object", "properties": {"s": {"type": "integer"}}},
}

# JSON texts of arguments that every format carries unchanged.
ARGUMENTS = (
    "{}",
    '{"a": 1}',
    '{"a":-1.5e+3,"b":null,"c":[true,false]}',
    '{"a": {"b": {"c": [1, [2, {"d": []}]]}}}',
    '{"city": "Zürich – 東京 🎉"}',
    '{"s": "a \\"quoted\\" \\\\ back\\/slash \\u00e9\\ud83c\\udf89"}',
    '{"s": "{[}]\\", \\"name\\": \\"g\\""}',
    '{"s": "line\\nbreak\\ttab"}',
    '{\n  "a": 1,\n  "b": [\n    2\n  ]\n}',
    '{"": "", "arguments": {"name": "x"}}',
)


@dataclass(frozen=True)
class Shape:
    """A text and its events."""

    name: str
    text: str
    events: tuple[Event, ...]


def call(name: str = "f", arguments: str = "{}") -> tuple[Event, ...]:
    """Return the events of a whole call."""
    return (CallStart(name), CallArguments(arguments))


def text(content: str) -> tuple[Event, ...]:
    """Return the event of content."""
    return (Content(content),)


def arguments_shapes(write: Callable[[str, str], str]) -> list[Shape]:
    """Return a shape for each of ARGUMENTS, alone and between two other calls."""
    shapes = []
    for index, arguments in enumerate(ARGUMENTS):
        shapes.append(Shape(f"arguments {index}", write("f", arguments), call("f", arguments)))
    return shapes


def parser(tool: str | None, reasoning: str | None = None, *, prompt: str = "", **options: Any) -> AnswerParser:
    """Return the parser of one answer."""
    family = Parsers(tool, reasoning).family(TOOLS if tool else None, prompt)
    assert family is not None
    return AnswerParser(family, **options)


def parse(machine: AnswerParser, *pieces: str) -> tuple[Event, ...]:
    """Return the events of an answer that comes in pieces, with neighbours of a kind joined."""
    events: list[Event] = []
    for piece in pieces:
        events += machine.feed(piece)
    joined: list[Any] = []
    for event in [*events, *machine.feed("", final=True)]:
        if joined and type(joined[-1]) is type(event) and not isinstance(event, CallStart):
            joined[-1] = type(event)(joined[-1].text + event.text)
        else:
            joined.append(event)
    assert all(isinstance(event, CallStart | CallArguments | Content | Reasoning) for event in joined)
    return tuple(joined)
