"""Hermes: calls as JSON objects between <tool_call> and </tool_call>."""

from __future__ import annotations

import pytest

from deployments.parsers.events import CallArguments, CallStart, Content
from tests.deployments.parsers.shapes import Shape, arguments_shapes, call, parse, parser, text

ONE = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = call("f", '{"a": 1}')

SHAPES = [
    *arguments_shapes(lambda name, args: f'<tool_call>\n{{"name": "{name}", "arguments": {args}}}\n</tool_call>'),
    Shape("no call", "Hello, world.\n", text("Hello, world.\n")),
    Shape("empty", "", ()),
    Shape("whitespace", " \n", text(" \n")),
    Shape("two calls", f"{ONE}\n{ONE}", F + F),
    Shape("three calls without space", ONE * 3, F * 3),
    Shape("text before", f"Let me look.\n\n{ONE}", text("Let me look.") + F),
    Shape("text after", f"{ONE}\nDone. ", F + text("Done. ")),
    Shape("text between", f"a {ONE} b {ONE} c", text("a") + F + text("  b") + F + text("  c")),
    Shape("whitespace around", f"\n\n{ONE}\n\n", F),
    Shape("no end marker", ONE.removesuffix("</tool_call>"), F),
    Shape("end of text after the object", ONE.removesuffix("\n</tool_call>"), F),
    Shape("no whitespace", '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', call("f", '{"a":1}')),
    Shape("parameters", ONE.replace("arguments", "parameters"), F),
    Shape("arguments first", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', F),
    Shape("no arguments", '<tool_call>{"name": "ping"}</tool_call>', call("ping")),
    Shape("null arguments", '<tool_call>{"name": "ping", "arguments": null}</tool_call>', call("ping")),
    Shape("arguments as text", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', F),
    Shape("other keys", '<tool_call>{"id": [1], "name": "f", "type": "x", "arguments": {"a": 1}}</tool_call>', F),
    Shape("keys after", '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "x"}</tool_call>', F),
    Shape("list", '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "ping"}]</tool_call>', F + call("ping")),
    Shape("two between the markers", f"{ONE[:-13]}\n{ONE[12:]}", F + F),
    Shape("unknown name", '<tool_call>{"name": "other-1.x", "arguments": {}}</tool_call>', call("other-1.x")),
    Shape("marker in a string", ONE.replace("1", '"</tool_call>"'), call("f", '{"a": "</tool_call>"}')),
    Shape("raw line break in a string", ONE.replace("1", '"x\ny"'), call("f", '{"a": "x\\ny"}')),
    Shape("missing brace", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> b', F + text("b")),
    Shape("truncated arguments", '<tool_call>{"name": "f", "arguments": {"a": [1, ', call("f", '{"a": [1, ')),
    Shape("truncated string", '<tool_call>{"name": "f", "arguments": {"a": "x\\', call("f", '{"a": "x\\')),
    Shape("truncated name", 'a <tool_call>{"name": "f', text('a <tool_call>{"name": "f')),
    Shape("truncated marker", "a <tool_ca", text("a <tool_ca")),
    Shape("only the marker", "<tool_call>", text("<tool_call>")),
    Shape("no JSON", "<tool_call> none </tool_call>", text("<tool_call> none </tool_call>")),
    Shape("then a good one", f"<tool_call>x</tool_call> {ONE}", text("<tool_call>x</tool_call>") + F),
    Shape("marker twice", f"<tool_call>{ONE}", text("<tool_call>") + F),
    Shape("no name", '<tool_call>{"arguments": {}}</tool_call>', text('<tool_call>{"arguments": {}}</tool_call>')),
    Shape("empty name", '<tool_call>{"name": ""}</tool_call>', text('<tool_call>{"name": ""}</tool_call>')),
    Shape(
        "name with a space", '<tool_call>{"name": "a b"}</tool_call>', text('<tool_call>{"name": "a b"}</tool_call>')
    ),
    Shape("an unpaired surrogate", '<tool_call>{"name": "\\ud800"}', text('<tool_call>{"name": "\\ud800"}')),
    Shape(
        "list as arguments",
        '<tool_call>{"name": "f", "arguments": [1]}',
        text('<tool_call>{"name": "f", "arguments": [1]}'),
    ),
    Shape("single quotes", "<tool_call>{'name': 'f'}</tool_call>", text("<tool_call>{'name': 'f'}</tool_call>")),
    Shape("end marker alone", "a</tool_call>b", text("a</tool_call>b")),
    Shape(
        "broken arguments",
        '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>',
        (CallStart("f"), CallArguments('{"a": '), Content("oops}}</tool_call>")),
    ),
    Shape(
        "trailing comma",
        '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>',
        (CallStart("f"), CallArguments('{"a": 1,'), Content("}}</tool_call>")),
    ),
    Shape(
        "second of a list is broken",
        '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"nam": 2}]</tool_call>',
        (*F, Content('{"nam": 2}]</tool_call>')),
    ),
    Shape(
        "Python's None",
        '<tool_call>{"name": "f", "arguments": None}',
        text('<tool_call>{"name": "f", "arguments": None}'),
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_whole(shape: Shape) -> None:
    assert parse(parser("hermes"), shape.text) == shape.events


def test_arguments_are_streamed_as_they_come() -> None:
    machine = parser("hermes")
    assert machine.feed('text <tool_call>{"name": "f"') == [Content("text")]
    assert machine.feed(', "arguments": ') == []
    assert machine.feed('{"a": "Par') == [CallStart("f"), CallArguments('{"a": "Par')]
    assert machine.feed("is") == [CallArguments("is")]
    assert machine.feed('"}}\n</tool') == [CallArguments('"}')]
    assert machine.feed("_call>", final=True) == []
    assert machine.num_calls == 1


def test_text_is_streamed_as_it_comes() -> None:
    machine = parser("hermes")
    assert machine.feed("Hello ") == [Content("Hello")]
    assert machine.feed("there <tool") == [Content(" there")]
    assert machine.feed("box", final=True) == [Content(" <toolbox")]


def test_calls_over_the_limit_are_dropped() -> None:
    machine = parser("hermes", max_calls=1)
    assert parse(machine, f"a {ONE} b {ONE} c") == (*text("a"), *F, *text("  b  c"))
    assert machine.num_calls == 1
