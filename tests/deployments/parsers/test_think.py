"""Reasoning between markers, alone and before tool calls."""

from __future__ import annotations

import pytest

from deployments.parsers.events import CallArguments, CallStart, Event, Reasoning
from tests.deployments.parsers.shapes import Shape, call, parse, parser, text

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
F = call("f", '{"a": 1}')
R: tuple[Event, ...] = (Reasoning("Think."),)
SHAPES = [
    Shape("both", "<think>\nThink.\n</think>\n\nHello", R + text("Hello")),
    Shape("on one line", "<think>Think.</think>Hello", R + text("Hello")),
    Shape("none", "Hello\n", text("Hello\n")),
    Shape("whitespace first", "\n<think>Think.</think>", R),
    Shape("whitespace and text", "\n Hello", text("\n Hello")),
    Shape("empty", "<think>\n\n</think>\n\nHello", text("Hello")),
    Shape("nothing", "", ()),
    Shape("truncated", "<think>Think.", R),
    Shape("truncated end marker", "<think>Think.</thi", (Reasoning("Think.</thi"),)),
    Shape("truncated start marker", "<thi", text("<thi")),
    Shape("only the start", "<think>", ()),
    Shape("end alone", "a</think>b", text("a</think>b")),
    Shape("later", "a<think>b</think>", text("a<think>b</think>")),
    Shape("twice", "<think>Think.</think>a<think>b</think>", R + text("a<think>b</think>")),
    Shape("nested", "<think>Think.<think></think>a", (Reasoning("Think.<think>"), *text("a"))),
    Shape("angles", "<think>a < b </ c</think>d", (Reasoning("a < b </ c"), *text("d"))),
    Shape("paragraphs", "<think>a\n\nb\n</think>c\n\nd\n", (Reasoning("a\n\nb"), *text("c\n\nd\n"))),
    Shape("call after", f"<think>Think.</think>\n\n{CALL}", R + F),
    Shape("text and call after", f"<think>Think.</think>\n\nSo: {CALL}", R + text("So:") + F),
    Shape("call inside", f"<think>Maybe {CALL}</think>no", (Reasoning(f"Maybe {CALL}"), *text("no"))),
    Shape("call without reasoning", CALL, F),
    Shape("two calls", f"<think>Think.</think>{CALL}{CALL}", R + F + F),
    Shape("broken call", "<think>Think.</think><tool_call>", R + text("<tool_call>")),
    Shape(
        "truncated call",
        f"<think>Think.</think>{CALL[: CALL.index(': 1')]}",
        (*R, CallStart("f"), CallArguments('{"a"')),
    ),
    Shape("unicode", "<think>考える🎉</think>はい", (Reasoning("考える🎉"), *text("はい"))),
    Shape("code", "<think>`</th`</think>ok", (Reasoning("`</th`"), *text("ok"))),
    Shape("trailing whitespace", "<think>Think.</think>\n\n", R),
    Shape("JSON", '<think>Think.</think>{"a": 1}', R + text('{"a": 1}')),
    Shape("space only inside", "<think> </think>", ()),
    Shape("indented", "<think>\n  a\n  b\n</think>x", (Reasoning("a\n  b"), *text("x"))),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_whole(shape: Shape) -> None:
    assert parse(parser("hermes", "qwen3"), shape.text) == shape.events


@pytest.mark.parametrize(
    ("name", "prompt", "is_open"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3", "<|im_start|>assistant\n", False),
        ("deepseek_r1", "<|im_start|>assistant\n", True),
        ("deepseek_r1", "<think>\n</think>\n", False),
    ],
)
def test_the_prompt_may_open_reasoning(name: str, prompt: str, is_open: bool) -> None:
    expected = (*R, *text("Hello")) if is_open else text("Think.</think>\nHello")
    assert parse(parser(None, name, prompt=prompt), "Think.</think>\nHello") == expected
    assert parse(parser(None, name, prompt=prompt), "<think>Think.</think>Hello") == (*R, *text("Hello"))


def test_reasoning_can_be_left_out() -> None:
    machine = parser("hermes", "qwen3", include_reasoning=False)
    assert parse(machine, f"<think>Think.</think>\n\nHello {CALL}") == text("Hello") + F


def test_mistral_has_markers_of_its_own() -> None:
    assert parse(parser(None, "mistral"), "[THINK]Think.[/THINK]Hello") == (*R, *text("Hello"))
