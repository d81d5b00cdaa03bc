"""Pythonic calls: an answer that is a list of calls."""

from __future__ import annotations

import pytest

from tests.deployments.parsers.shapes import Shape, call, parse, parser, text

F = call("f", '{"a": 1}')


def _value(python: str, json: str) -> Shape:
    return Shape(f"value {python[:20]}", f"[f(x={python})]", call("f", f'{{"x": {json}}}'))


SHAPES = [
    _value("1", "1"),
    _value("-2.5", "-2.5"),
    _value("1e3", "1000.0"),
    _value("True", "true"),
    _value("false", "false"),
    _value("None", "null"),
    _value("null", "null"),
    _value("'it\\'s'", '"it\'s"'),
    _value('"a)b]"', '"a)b]"'),
    _value('"東京 🎉"', '"東京 🎉"'),
    _value('"\\n"', '"\\n"'),
    _value("'\\ud800'", '"\\ud800"'),
    _value('["a", 1, (2,)]', '["a", 1, [2]]'),
    _value("{'k': {'l': []}}", '{"k": {"l": []}}'),
    Shape("one", "[f(a=1)]", F),
    Shape("no arguments", "[ping()]", call("ping")),
    Shape("two", "[f(a=1), ping()]", F + call("ping")),
    Shape("lines", "[\n  f(a=1),\n  f(\n    a=1,\n  )\n]", F + F),
    Shape("two arguments", '[f(a=1, s="x, y")]', call("f", '{"a": 1, "s": "x, y"}')),
    Shape("whitespace around", "\n [f(a=1)]\n", F),
    Shape("Llama 4", "<|python_start|>[f(a=1)]<|python_end|>", F),
    Shape("marker after text", "Sure. <|python_start|>[f(a=1)]<|python_end|>", text("Sure.") + F),
    Shape("text after", "[f(a=1)] ok", F + text("ok")),
    Shape("no call", "Hello", text("Hello")),
    Shape("list for the user", "[1, 2]", text("[1, 2]")),
    Shape("link", "[see (1)](x)", text("[see (1)](x)")),
    Shape("empty list", "[]", text("[]")),
    Shape("unknown tool", "[g(a=1)]", text("[g(a=1)]")),
    Shape("second is unknown", "[f(a=1), g(a=1)]", F + text("g(a=1)]")),
    Shape("positional", "[f(1)]", text("[f(1)]")),
    Shape("expression", "[f(a=1+1)]", text("[f(a=1+1)]")),
    Shape("nested call", "[f(a=open('x'))]", text("[f(a=open('x'))]")),
    Shape("dict unpacking", "[f(**{'a': 1})]", text("[f(**{'a': 1})]")),
    Shape("key that is no text", "[f(a={1: 2})]", text("[f(a={1: 2})]")),
    Shape("bytes", "[f(a=b'x')]", text("[f(a=b'x')]")),
    Shape("infinity", "[f(a=1e999)]", text("[f(a=1e999)]")),
    Shape("syntax error", "[f(a=)]", text("[f(a=)]")),
    Shape("repeated argument", "[f(a=1, a=2)]", text("[f(a=1, a=2)]")),
    Shape("truncated", "[f(a=1", text("[f(a=1")),
    Shape("truncated string", "[f(a='x)]", text("[f(a='x)]")),
    Shape("truncated list", "[f(a=1)", F),
    Shape("deep", f"[f(a={'[' * 300}{']' * 300})]", text(f"[f(a={'[' * 300}{']' * 300})]")),
    Shape("deep negations", f"[f(a={'-' * 9000}1)]", text(f"[f(a={'-' * 9000}1)]")),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_whole(shape: Shape) -> None:
    assert parse(parser("pythonic"), shape.text) == shape.events
