"""Mistral: calls after [TOOL_CALLS], as a JSON list or as name[ARGS]{...}."""

from __future__ import annotations

import pytest

from deployments.parsers.events import CallArguments, CallStart, Content
from deployments.parsers.tool_parsers import TOOL_PARSERS
from tests.deployments.parsers.shapes import Shape, arguments_shapes, call, parse, parser, text

NEW = '[TOOL_CALLS]f[ARGS]{"a": 1}'
OLD = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'
F = call("f", '{"a": 1}')

SHAPES = [
    *arguments_shapes(lambda name, args: f"[TOOL_CALLS]{name}[ARGS]{args}"),
    *arguments_shapes(lambda name, args: f'[TOOL_CALLS][{{"name": "{name}", "arguments": {args}}}]'),
    Shape("no call", "Hello [world].", text("Hello [world].")),
    Shape("new", NEW, F),
    Shape("old", OLD, F),
    Shape("two new", NEW + NEW, F + F),
    Shape("two old", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "ping"}]', F + call("ping")),
    Shape("old with ids", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', F),
    Shape("object", '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}', F),
    Shape("new with an id", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', F),
    Shape("id without [ARGS]", '[TOOL_CALLS]f[CALL_ID]abcdefghi{"a": 1}', F),
    Shape("without [ARGS]", '[TOOL_CALLS]f{"a": 1}', F),
    Shape("space", '[TOOL_CALLS] f [ARGS] {"a": 1} ', F),
    Shape("text before", f"Looking. {NEW}", text("Looking.") + F),
    Shape("text after", f"{OLD} ok", F + text("ok")),
    Shape("marker in a string", NEW.replace("1", '"[ARGS]"'), call("f", '{"a": "[ARGS]"}')),
    Shape("truncated arguments", NEW[:-1], (CallStart("f"), CallArguments('{"a": 1'))),
    Shape("truncated name", "[TOOL_CALLS]get_we", text("[TOOL_CALLS]get_we")),
    Shape("truncated marker", "[TOOL_CALLS]f[AR", text("[TOOL_CALLS]f[AR")),
    Shape("truncated list", "[TOOL_CALLS][", text("[TOOL_CALLS][")),
    Shape("no name", '[TOOL_CALLS][ARGS]{"a": 1}', text('[TOOL_CALLS][ARGS]{"a": 1}')),
    Shape("prose", "[TOOL_CALLS] is a marker\n{}", text("[TOOL_CALLS] is a marker\n{}")),
    Shape("name of two words", "[TOOL_CALLS]f g[ARGS]{}", text("[TOOL_CALLS]f g[ARGS]{}")),
    Shape("list as arguments", "[TOOL_CALLS]f[ARGS][1]", text("[TOOL_CALLS]f[ARGS][1]")),
    Shape("empty list", "[TOOL_CALLS][]", text("[TOOL_CALLS][]")),
    Shape("broken", '[TOOL_CALLS]f[ARGS]{"a" 1}', (CallStart("f"), CallArguments('{"a" '), Content("1}"))),
    Shape("broken, then a good one", f"[TOOL_CALLS]?{NEW}", text("[TOOL_CALLS]?") + F),
    Shape("long name", f"[TOOL_CALLS]{'x' * 300}[ARGS]{{}}", text(f"[TOOL_CALLS]{'x' * 300}[ARGS]{{}}")),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_whole(shape: Shape) -> None:
    assert parse(parser("mistral"), shape.text) == shape.events


def test_the_templates_accept_ids_of_nine_characters_only() -> None:
    assert TOOL_PARSERS["mistral"].call_id_length == 9
