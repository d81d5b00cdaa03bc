"""Llama 3 and 4: answers that are calls in JSON."""

from __future__ import annotations

import pytest

from deployments.parsers.events import CallArguments, CallStart, Content
from tests.deployments.parsers.shapes import Shape, arguments_shapes, call, parse, parser, text

ONE = '{"name": "f", "parameters": {"a": 1}}'
F = call("f", '{"a": 1}')

SHAPES = [
    *arguments_shapes(lambda name, args: f'{{"name": "{name}", "parameters": {args}}}'),
    *arguments_shapes(lambda name, args: f'<|python_tag|>{{"name": "{name}", "parameters": {args}}}'),
    Shape("no call", "Hello.", text("Hello.")),
    Shape("whitespace first", f"\n\n{ONE}", F),
    Shape("whitespace before text", "\n\nHello", text("\n\nHello")),
    Shape("two calls", f"{ONE}; {ONE}", F + F),
    Shape("two lines", f"{ONE}\n{ONE}", F + F),
    Shape("list", f"[{ONE}, {ONE}]", F + F),
    Shape("marker", f"<|python_tag|>{ONE}", F),
    Shape("marker after text", f"Sure. <|python_tag|>{ONE}", text("Sure.") + F),
    Shape("Llama 4", f"<|python_start|>{ONE}<|python_end|>", F),
    Shape("Llama 4, text after", f"<|python_start|>{ONE}<|python_end|> ok", F + text("ok")),
    Shape("type", '{"type": "function", "name": "f", "parameters": {"a": 1}}', F),
    Shape("arguments", ONE.replace("parameters", "arguments"), F),
    Shape("parameters first", '{"parameters": {"a": 1}, "name": "f"}', F),
    Shape("no parameters", '{"name": "ping"}', call("ping")),
    Shape("text after", f"{ONE} That is it.", F + text("That is it.")),
    Shape("separator at the end", f"{ONE};", F + text(";")),
    Shape("JSON for the user", '{"name": "Bob", "age": 3}', text('{"name": "Bob", "age": 3}')),
    Shape("list for the user", "[1, 2]", text("[1, 2]")),
    Shape("call of an unknown tool", '{"name": "g", "parameters": {}}', text('{"name": "g", "parameters": {}}')),
    Shape("then an unknown tool", f'{ONE}; {{"name": "g"}}', F + text('; {"name": "g"}')),
    Shape("code", "<|python_tag|>print(1)", text("<|python_tag|>print(1)")),
    Shape("JSON inside text", f"Use {ONE}", text(f"Use {ONE}")),
    Shape("truncated parameters", ONE[:-2], (CallStart("f"), CallArguments('{"a": 1'))),
    Shape("truncated name", '{"name": "f', text('{"name": "f')),
    Shape("only a brace", "{", text("{")),
    Shape("broken", '{"name": "f", "parameters": {a}}', (CallStart("f"), CallArguments("{"), Content("a}}"))),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_whole(shape: Shape) -> None:
    assert parse(parser("llama3_json"), shape.text) == shape.events


XLAM = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    "answer",
    [
        f"[{XLAM}]",
        XLAM,
        f"```json\n[{XLAM}]\n```",
        f"```\n{XLAM}\n```",
        f"[TOOL_CALLS][{XLAM}]",
        f"<tool_call>[{XLAM}]</tool_call>",
    ],
)
def test_xlam_writes_calls_after_other_markers(answer: str) -> None:
    assert parse(parser("xlam"), answer) == F
    if not answer.endswith("}]") and not answer.startswith("{"):
        assert parse(parser("xlam"), f"So:\n{answer}") == text("So:") + F


@pytest.mark.parametrize("answer", ["```json\n{}\n```", "```\nx\n```", '[{"name": "other"}]', "<tool_call>"])
def test_what_xlam_does_not_write_is_text(answer: str) -> None:
    assert parse(parser("xlam"), answer) == text(answer)
