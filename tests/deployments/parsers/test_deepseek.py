"""DeepSeek V3 and V3.1."""

from __future__ import annotations

import pytest

from deployments.parsers.events import CallArguments, CallStart, Content
from tests.deployments.parsers.shapes import Shape, arguments_shapes, call, parse, parser, text

FIRST, LAST = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def v3(name: str, arguments: str) -> str:
    return f"{BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{END}"


def v31(name: str, arguments: str) -> str:
    return f"{BEGIN}{name}{SEPARATOR}{arguments}{END}"


ONE = v31("f", '{"a": 1}')
F = call("f", '{"a": 1}')

SHAPES = [
    *arguments_shapes(lambda name, args: FIRST + v3(name, args) + LAST),
    *arguments_shapes(lambda name, args: FIRST + v31(name, args) + LAST),
    Shape("no call", "a < b ｜ c", text("a < b ｜ c")),
    Shape("two of V3", f"{FIRST}{v3('f', '{}')}\n{v3('g', '{}')}{LAST}", call("f") + call("g")),
    Shape("two of V3.1", FIRST + ONE + ONE + LAST, F + F),
    Shape("without the outer markers", ONE, F),
    Shape("text before", f"Let me see.\n\n{FIRST}{ONE}{LAST}", text("Let me see.") + F),
    Shape("text after", f"{FIRST}{ONE}{LAST} ok", F + text("ok")),
    Shape("no end markers", FIRST + ONE.removesuffix(END), F),
    Shape("no closing fence", v3("f", '{"a": 1}').replace("\n```" + END, ""), F),
    Shape("fence without its language", v3("f", '{"a": 1}').replace("json", ""), F),
    Shape("line break before arguments", v31("f", '\n{"a": 1}'), F),
    Shape("fence in a string", v3("f", '{"a": "```"}'), call("f", '{"a": "```"}')),
    Shape("marker in a string", v31("f", f'{{"a": "{END}"}}'), call("f", f'{{"a": "{END}"}}')),
    Shape("truncated arguments", ONE.removesuffix("}" + END), (CallStart("f"), CallArguments('{"a": 1'))),
    Shape("truncated name", f"{FIRST}{BEGIN}get_we", text(f"{BEGIN}get_we")),
    Shape("truncated marker", "a <｜tool▁ca", text("a <｜tool▁ca")),
    Shape("only markers", FIRST + LAST, ()),
    Shape("no separator", f"{BEGIN}f {{}}{END}", text(f"{BEGIN}f {{}}{END}")),
    Shape("no name", f"{BEGIN}{SEPARATOR}{{}}{END}", text(f"{BEGIN}{SEPARATOR}{{}}{END}")),
    Shape("list as arguments", v3("f", "[1]"), text(v3("f", "[1]"))),
    Shape("broken", v31("f", "{1}"), (CallStart("f"), CallArguments("{"), Content(f"1}}{END}"))),
    Shape("broken, then a good one", f"{BEGIN}\n{ONE}", text(f"{BEGIN}") + F),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_whole(shape: Shape) -> None:
    assert parse(parser("deepseek_v3"), shape.text) == shape.events
    assert parse(parser("deepseek_v31"), shape.text) == shape.events
