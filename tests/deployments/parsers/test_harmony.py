"""GPT-OSS: messages with channels."""

from __future__ import annotations

import pytest

from deployments.parsers.events import CallArguments, CallStart, Content, Reasoning
from tests.deployments.parsers.shapes import Shape, arguments_shapes, call, parse, parser, text

ANALYSIS = "<|channel|>analysis<|message|>Think.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Hello<|return|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
ARGS, CODE = '{"a": 1}', 'if a < 1:\n    b = "<|"\n'
F = call("f", '{"a": 1}')
R = (Reasoning("Think."),)

SHAPES = [
    *arguments_shapes(lambda name, args: CALL.replace('{"a": 1}', args)),
    Shape("final alone", "<|channel|>final<|message|>Hello<|return|>", text("Hello")),
    Shape("analysis and final", ANALYSIS + FINAL, R + text("Hello")),
    Shape("no header", "Hello", text("Hello")),
    Shape("empty", "", ()),
    Shape("call", CALL, F),
    Shape("analysis and call", f"{ANALYSIS}<|start|>assistant{CALL}", R + F),
    Shape("preamble", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}", text("I look.") + F),
    Shape(
        "recipient before the channel",
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}',
        F,
    ),
    Shape("no constraint", CALL.replace(" <|constrain|>json", ""), F),
    Shape("on the analysis channel", CALL.replace("commentary", "analysis"), F),
    Shape("two calls", f"{CALL}<|start|>assistant{CALL}", F + F),
    Shape("no end", CALL.removesuffix("<|call|>"), F),
    Shape("no arguments", CALL.replace('{"a": 1}', ""), call("f")),
    Shape("two analyses", f"{ANALYSIS}<|start|>assistant{ANALYSIS}", (Reasoning("Think.\nThink."),)),
    Shape(
        "no end between",
        "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b",
        (Reasoning("a"), *text("b")),
    ),
    Shape("built-in tool", "<|channel|>analysis to=python code<|message|>print(1)<|call|>", (Reasoning("print(1)"),)),
    Shape("commentary built-in tool", "<|channel|>commentary to=browser.open<|message|>{}", (Reasoning("{}"),)),
    Shape("text with angles", "<|channel|>final<|message|>a <| b < c<|return|>", text("a <| b < c")),
    Shape("truncated analysis", ANALYSIS[:-9], (Reasoning("Thin"),)),
    Shape("truncated header", f"{ANALYSIS}<|start|>assistant<|chan", (*R, *text("<|start|>assistant<|chan"))),
    Shape("truncated arguments", CALL[:-9], (CallStart("f"), CallArguments('{"a": 1'))),
    Shape("truncated name", CALL[:30], text(CALL[:30])),
    Shape("broken", CALL.replace(" 1", " x"), (CallStart("f"), CallArguments('{"a": '), Content("x}"))),
    Shape("no object", CALL.replace('{"a": 1}', "x"), call("f", '{"input": "x"}')),
    Shape("a list", CALL.replace('{"a": 1}', '[1, "b"]'), call("f", '{"input": "[1, \\"b\\"]"}')),
    Shape(
        "code for the only parameter",
        f"{CALL}<|start|>assistant{CALL.replace('functions.f', 'functions.run').replace(ARGS, CODE)}{FINAL}",
        F + call("run", '{"code": "if a < 1:\\n    b = \\"<|\\"\\n"}') + text("Hello"),
    ),
    Shape("a number for it", CALL.replace(".f", ".wait").replace(ARGS, "3"), call("wait", '{"s": 3}')),
    Shape("no name", CALL.replace("functions.f", "functions."), text('{"a": 1}')),
    Shape("long header", f"<|channel|>{'x' * 600}<|message|>a", text(f"<|channel|>{'x' * 600}<|message|>a")),
    Shape("unknown channel", "<|channel|>other<|message|>a", text("a")),
    Shape("no channel", "<|start|>assistant<|message|>a<|end|>", text("a")),
    Shape(
        "whitespace",
        "<|channel|>analysis<|message|>\na\n<|end|><|start|>assistant<|channel|>final<|message|>\nb\n",
        (Reasoning("a"), *text("b\n")),
    ),
    Shape("recipient first", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', F),
    Shape("built-in recipient first", " to=python<|channel|>analysis code<|message|>x", (Reasoning("x"),)),
    Shape("no recipient", " to=functions.f is a header", text(" to=functions.f is a header")),
    Shape("call without analysis, text after", f"{CALL}{FINAL}", F + text("Hello")),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_whole(shape: Shape) -> None:
    assert parse(parser("openai", "openai_gptoss"), shape.text) == shape.events


def test_without_tools_their_messages_are_content() -> None:
    assert parse(parser(None, "openai_gptoss"), ANALYSIS + CALL) == (*R, *text('{"a": 1}'))
