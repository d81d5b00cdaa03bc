"""Qwen3-Coder: calls as XML whose values are text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.parsers.answer_parser import AnswerParser
from deployments.parsers.events import CallArguments, CallStart, Content
from deployments.parsers.json_scanner import JsonScanner
from deployments.parsers.registry import Parsers
from tests.deployments.parsers.shapes import TOOLS, Shape, call, parse, parser, text


def xml(name: str = "get_weather", **values: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def _value(key: str, value: str, expected: str) -> Shape:
    return Shape(f"{key} {value[:12]!r}", xml(**{key: value}), call("get_weather", f'{{"{key}": {expected}}}'))


ONE = xml("f", a="1")
F = call("f", '{"a": 1}')

SHAPES = [
    _value("city", "Paris", '"Paris"'),
    _value("city", "3", '"3"'),
    _value("city", "", '""'),
    _value("city", " a \n\n b ", '" a \\n\\n b "'),
    _value("city", 'say "hi" \\ 東京 🎉', '"say \\"hi\\" \\\\ 東京 🎉"'),
    _value("city", "<b>x</b> </param", '"<b>x</b> </param"'),
    _value("days", "3", "3"),
    _value("days", "three", '"three"'),
    _value("days", " 4 ", "4"),
    _value("exact", "true", "true"),
    _value("exact", "False", "false"),
    _value("where", '{"a": [1, {"b": "ü"}]}', '{"a": [1, {"b": "ü"}]}'),
    _value("where", "{'a': True}", '{"a": true}'),
    _value("tags", '["a",\n"b"]', '["a",\n"b"]'),
    _value("tags", "[NaN]", '"[NaN]"'),
    _value("unit", "None", "null"),
    _value("unit", "null", "null"),
    _value("unit", "12", '"12"'),
    _value("size", "1.5", "1.5"),
    _value("size", "true", '"true"'),
    _value("code", "x", '"x"'),
    _value("code", "1", '"1"'),
    _value("other", "1", '"1"'),
    Shape("no call", "a < b", text("a < b")),
    Shape("no arguments", xml("ping"), call("ping")),
    Shape("two arguments", xml(city="Oslo", days="2"), call("get_weather", '{"city": "Oslo", "days": 2}')),
    Shape("two calls", f"{ONE}\n{ONE}", F + F),
    Shape("text around", f"Now:\n\n{ONE}\n\nok", text("Now:") + F + text("\n\n\n\nok")),
    Shape("without the outer markers", ONE[12:-13], F),
    Shape("on one line", "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>", F),
    Shape("no end of a call", ONE.replace("</function>\n", "") + "\nok", F + text("ok")),
    Shape(
        "no end of a call after text",
        xml(city="Oslo").replace("</function>\n", "") * 2,
        call("get_weather", '{"city": "Oslo"}') * 2,
    ),
    Shape("unknown tool", xml("g", a="1"), call("g", '{"a": "1"}')),
    Shape("no JSON escape in a key", xml("f", **{'a"b': "1"}), call("f", '{"a\\"b": "1"}')),
    Shape(
        "truncated string",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        (CallStart("get_weather"), CallArguments('{"city": "Par')),
    ),
    Shape(
        "truncated number",
        "<tool_call>\n<function=f>\n<parameter=a>\n12",
        (CallStart("f"), CallArguments('{"a": '), *text("12")),
    ),
    Shape("truncated name", "<tool_call>\n<function=get_we", text("<tool_call>\n<function=get_we")),
    Shape("truncated key", "<function=f><parameter=", (CallStart("f"),)),
    Shape("JSON instead", '<tool_call>{"name": "f"}</tool_call>', text('<tool_call>{"name": "f"}</tool_call>')),
    Shape("nothing after the name", "<tool_call><function=f></tool_call>", text("<tool_call><function=f></tool_call>")),
    Shape("text after the name", "<function=f>so</function>", text("<function=f>so</function>")),
    Shape("no name", "<tool_call><function=></function>", text("<tool_call><function=></function>")),
    Shape("name with a line break", "<function=a\nb>", text("<function=a\nb>")),
    Shape(
        "text between parameters",
        "<function=f>\n<parameter=a>\n1\n</parameter>\nso </function>",
        (CallStart("f"), CallArguments('{"a": 1'), Content("so </function>")),
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_whole(shape: Shape) -> None:
    assert parse(parser("qwen3_coder"), shape.text) == shape.events


def test_strings_are_streamed_as_they_come() -> None:
    machine = parser("qwen3_coder")
    machine.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert machine.feed("New\n") == [CallArguments("New")]
    assert machine.feed("York\n</par") == [CallArguments("\\nYork")]


@pytest.mark.parametrize("schema", [{"type": None}, {"type": 3}, {"anyOf": 5}, {"oneOf": {"type": "string"}}])
def test_a_schema_that_no_one_has_checked_raises_nothing(schema: dict[str, Any]) -> None:
    family = Parsers("qwen3_coder", None).family({"f": {"properties": {"a": schema}}}, "")
    assert family is not None
    assert parse(AnswerParser(family), xml("f", a="1"))[0] == CallStart("f")


def test_whole_calls_are_valid_json() -> None:
    events = parse(parser("qwen3_coder"), xml(**dict.fromkeys(TOOLS["get_weather"]["properties"], '\x01"\\\n[')))
    assert isinstance(events[1], CallArguments)
    assert set(json.loads(events[1].text).values()) == {'\x01"\\\n['}


@pytest.mark.parametrize("value", ["x", '"x', "[1"], ids=["text", "an open string", "an open list"])
def test_ends_within_a_value_take_linear_work(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repeated end may end the value, so the value is checked after each."""
    scanned: list[int] = []
    scan = JsonScanner.scan

    def counted(scanner: JsonScanner, content: str, position: int) -> tuple[str, int]:
        scanned.append(len(content) - position)
        return scan(scanner, content, position)

    monkeypatch.setattr(JsonScanner, "scan", counted)
    written = value + "</parameter>" * 500
    answer = f"<tool_call>\n<function=get_weather>\n<parameter=days>{written}x"
    parse(parser("qwen3_coder"), answer)
    assert scanned
    assert sum(scanned) < 4 * len(written)


@pytest.mark.parametrize(
    ("key", "written", "expected"),
    [
        ("where", '{"a": "</parameter>"}', '{"a": "</parameter>"}'),
        ("tags", '["</parameter> </parameter>", 1]', '["</parameter> </parameter>", 1]'),
        ("tags", '["\\</parameter>"]', '["\\\\</parameter>"]'),  # as in Python
        ("days", "one</parameter>2", '"one</parameter>2"'),
    ],
)
def test_ends_within_a_value_are_text(key: str, written: str, expected: str) -> None:
    assert parse(parser("qwen3_coder"), xml(**{key: written})) == call("get_weather", f'{{"{key}": {expected}}}')
