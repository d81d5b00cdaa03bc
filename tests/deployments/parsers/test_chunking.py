"""However an answer is cut into pieces, its events are the same: every shape of every family, and random text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deployments.parsers.answer_parser import AnswerParser
from deployments.parsers.events import CallArguments, CallStart, Content, Reasoning
from deployments.parsers.families import forced
from deployments.parsers.reasoning_parsers import REASONING_PARSERS
from deployments.parsers.tool_parsers import TOOL_PARSERS
from tests.deployments.parsers import (
    test_deepseek,
    test_harmony,
    test_hermes,
    test_llama3_json,
    test_mistral,
    test_pythonic,
    test_qwen3_coder,
    test_think,
)
from tests.deployments.parsers.shapes import Shape, parse, parser

FAMILIES: dict[str, tuple[tuple[str | None, str | None], Sequence[Shape]]] = {
    "hermes": (("hermes", None), test_hermes.SHAPES),
    "mistral": (("mistral", "mistral"), test_mistral.SHAPES),
    "deepseek": (("deepseek_v3", "deepseek_v3"), test_deepseek.SHAPES),
    "llama3_json": (("llama3_json", None), test_llama3_json.SHAPES),
    "pythonic": (("pythonic", None), test_pythonic.SHAPES),
    "qwen3_coder": (("qwen3_coder", "qwen3"), test_qwen3_coder.SHAPES),
    "harmony": (("openai", "openai_gptoss"), test_harmony.SHAPES),
    "think": (("hermes", "qwen3"), test_think.SHAPES),
}
JSON_PIECES = ['{"name": "f", ', '"arguments": ', '"parameters": ', '{"a": 1}', '"\\u00', "e9", '"', "{", "}", "[", "]"]
JSON_PIECES += [
    ",",
    ":",
    "\\",
    " ",
    "\n",
    "null",
    "tru",
    "1",
    "-",
    ".5",
    "f",
    "ping",
    "(",
    ")",
    "a=",
    "'",
    ";",
    "東",
    "\x01",
]
EXTRA = [
    "<function=",
    "f>",
    "</function>",
    "<parameter=",
    "s>",
    "</parameter>",
    "```json\n",
    "\n```",
    "to=functions.f ",
]
EXTRA += ["<think>", "</think>", "analysis", "commentary", "final", "assistant", "name", "<", "<|", "["]


def cut(text: str, positions: Sequence[int]) -> list[str]:
    """Return ``text`` in pieces that end at ``positions``."""
    ends = sorted({position % (len(text) + 1) for position in positions})
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def markers(tool: str | None, reasoning: str | None) -> list[str]:
    """Return the markers of a model's formats."""
    markers = [
        *(TOOL_PARSERS[tool].markers if tool else ()),
        *(REASONING_PARSERS[reasoning].markers if reasoning else ()),
    ]
    return sorted(set(markers))


@pytest.mark.parametrize("family", FAMILIES)
def test_there_are_many_shapes(family: str) -> None:
    assert len({shape.text for shape in FAMILIES[family][1]}) >= 30


@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape_character_by_character_and_in_two_pieces(family: str) -> None:
    names, shapes = FAMILIES[family]
    for shape in shapes:
        whole = parse(parser(*names), shape.text)
        assert parse(parser(*names), *shape.text) == whole, shape.name
        for middle in range(min(len(shape.text), 80)):
            assert parse(parser(*names), shape.text[:middle], shape.text[middle:]) == whole, (shape.name, middle)


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_random_text_however_it_is_cut(family: str, data: Any) -> None:
    names, shapes = FAMILIES[family]
    pieces = st.sampled_from([*markers(*names), *JSON_PIECES, *EXTRA, *(shape.text for shape in shapes)])
    text = "".join(data.draw(st.lists(pieces | st.text(max_size=3), max_size=12)))
    positions = data.draw(st.lists(st.integers(0, max(1, len(text))), max_size=20))
    options = {"prompt": data.draw(st.sampled_from(["", "<think>\n", "</think>"]))}
    machine = parser(*names, **options)
    whole = parse(machine, text)
    assert parse(parser(*names, **options), *cut(text, positions)) == whole
    assert parse(parser(*names, **options), *text) == whole
    assert machine.num_calls == sum(isinstance(event, CallStart) for event in whole)
    for event in whole:
        (event.name if isinstance(event, CallStart) else event.text).encode()


@pytest.mark.parametrize("family", FAMILIES)
@given(text=st.text("abc <[{(\n'\"", max_size=30))
@example("[[[")
@settings(max_examples=20, deadline=None)
def test_text_without_markers_is_content_unchanged(family: str, text: str) -> None:
    events = parse(parser(*FAMILIES[family][0]), text)
    assert events == ((Content(text),) if text else ())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
WRITERS = {
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>',
    "mistral": "[TOOL_CALLS]f[ARGS]{}",
    "deepseek_v3": test_deepseek.v3("f", "{}"),
    "deepseek_v31": test_deepseek.v31("f", "{}"),
    "llama3_json": '{{"name": "f", "parameters": {}}}',
    "openai": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
}


@pytest.mark.parametrize("name", WRITERS)
@given(
    arguments=st.dictionaries(st.text(max_size=5), VALUES, max_size=4),
    ascii=st.booleans(),
    indent=st.sampled_from([None, 2]),
    positions=st.lists(st.integers(0, 1000), max_size=20),
)
@settings(max_examples=20, deadline=None)
def test_any_arguments_survive(
    name: str, arguments: dict[str, Any], ascii: bool, indent: int | None, positions: list[int]
) -> None:
    text = WRITERS[name].format(json.dumps(arguments, ensure_ascii=ascii, indent=indent))
    start, rest = parse(parser(name), *cut(text, positions))
    assert start == CallStart("f")
    assert isinstance(rest, CallArguments)
    assert json.loads(rest.text) == arguments


@given(
    arguments=st.fixed_dictionaries({}, optional={"a": st.integers(), "s": st.text()}),
    positions=st.lists(st.integers(0, 1000), max_size=20),
)
@settings(max_examples=25, deadline=None)
def test_any_strings_survive_as_xml_and_as_python(arguments: dict[str, Any], positions: list[int]) -> None:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    xml = f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"
    python = f"[f({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
    for name, text in (("qwen3_coder", xml), ("pythonic", python)):
        start, rest = parse(parser(name), *cut(text, positions))
        assert start == CallStart("f")
        assert isinstance(rest, CallArguments)
        assert json.loads(rest.text) == arguments


@given(text=st.lists(st.sampled_from(JSON_PIECES), max_size=10).map("".join), positions=st.lists(st.integers(0, 99)))
@settings(max_examples=25, deadline=None)
def test_forced_calls_however_they_are_cut(text: str, positions: list[int]) -> None:
    for family in (forced.required_calls, lambda reader: forced.named_call(reader, "f")):
        whole = parse(AnswerParser(family), text)
        assert parse(AnswerParser(family), *cut(text, positions)) == whole


def test_no_reasoning_event_is_empty() -> None:
    for names, shapes in FAMILIES.values():
        for shape in shapes:
            machine = parser(*names)
            events = [event for piece in shape.text for event in machine.feed(piece)]
            assert all(event.text for event in events if isinstance(event, Content | Reasoning | CallArguments))
