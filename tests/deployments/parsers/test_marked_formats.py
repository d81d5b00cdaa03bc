"""Formats whose calls follow markers: what the conformance suite does not write."""

from __future__ import annotations

import json

import pytest

from deployments.parsers.answer_parser import AnswerParser
from deployments.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from deployments.parsers.registry import Parsers
from tests.deployments.parsers.shapes import call, parse, parser, text

F = call("f", '{"a": 1}')
GEMMA = "<|tool_call>call:f{a:1}<tool_call|>"
SECTION = "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"


def test_gemma_reasons_between_calls_and_never_into_the_content() -> None:
    thought = "<|channel>thought\nHmm.\n<channel|>"
    expected = (Reasoning("Hmm."), *F, Reasoning("\nHmm."), Content("So."))
    assert parse(parser("gemma4", "gemma4"), f"{thought}{GEMMA}{thought}So.") == expected
    assert parse(parser(None, "gemma4"), f"So. {thought}") == (Content("So."), Reasoning("Hmm."))
    prompt = "<|turn>model\n<|channel>thought\n<channel|>"
    assert parse(parser("gemma4", "gemma4", prompt=prompt), f"So. {GEMMA}") == text("So.") + F
    assert parse(parser("gemma4", "gemma4"), "<|channel>thought\n<channel|>So.") == text("So.")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{}", "{}"),
        ("{a:1.5e3,b:null,c:None,d:[],e:{}}", '{"a": 1.5e3, "b": null, "c": null, "d": [], "e": {}}'),
        ('{<|"|>a b<|"|>:<|"|>}<tool_call|><|"|>}', '{"a b": "}<tool_call|>"}'),
        ('{ a : [ true , <|"|>x<|"|> ] }', '{"a ": [true, "x"]}'),
        ("{a:plain text}", '{"a": "plain text"}'),
    ],
)
def test_gemma_values(written: str, expected: str) -> None:
    assert parse(parser("gemma4"), f"<|tool_call>call:f{written}<tool_call|>") == call("f", expected)


@pytest.mark.parametrize(
    ("broken", "rest"), [("{a:", ""), ("{a", "a"), ("{a:1;b:2}", None), (f"{{a:{'[' * 99}", None), ("{,}", None)]
)
def test_broken_gemma_calls_end_as_text(broken: str, rest: str | None) -> None:
    events = parse(parser("gemma4"), f"<|tool_call>call:f{broken}")
    assert events[0] == CallStart("f")
    written = "".join(event.text for event in events if isinstance(event, CallArguments | Content))
    assert rest is None or written.endswith(rest)


@pytest.mark.parametrize(
    ("written", "name", "call_id"),
    [
        ("functions.f:0", "f", "functions.f:0"),
        (" functions.get_x-y:12 ", "get_x-y", "functions.get_x-y:12"),
        ("functions.f", "f", None),
        ("f:3", "f", None),
        ("f", "f", None),
    ],
)
def test_the_ids_that_kimi_writes_are_kept(written: str, name: str, call_id: str | None) -> None:
    assert parse(parser("kimi_k2"), SECTION.format(written, "{}")) == (CallStart(name, call_id), CallArguments("{}"))


def test_a_kimi_call_ends_reasoning_that_has_no_end() -> None:
    section = SECTION.format("functions.f:0", '{"a": 1}')
    expected: tuple[Event, ...] = (Reasoning("Hmm."), CallStart("f", "functions.f:0"), CallArguments('{"a": 1}'))
    assert parse(parser("kimi_k2", "kimi_k2"), f"<think>Hmm.{section}") == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("command='sed -n '1,9p' f.py', n=2", {"command": "sed -n '1,9p' f.py", "n": 2}),
        ("a='line\nbreak', b=\"it's\"", {"a": "line\nbreak", "b": "it's"}),
        ("a='', b=[1, None], c={'d': true}", {"a": "", "b": [1, None], "c": {"d": True}}),
        ("a='he said 'no', twice', b=False", {"a": "he said 'no', twice", "b": False}),
    ],
)
def test_lfm2_strings_are_written_as_they_are(values: str, expected: object) -> None:
    start, arguments = parse(parser("lfm2"), f"<|tool_call_start|>[f({values})]<|tool_call_end|>")
    assert start == CallStart("f")
    assert isinstance(arguments, CallArguments)
    assert json.loads(arguments.text) == expected


@pytest.mark.parametrize(
    "answer",
    [
        "<|tool_call_start|>[f(a=1)]",
        "<|tool_call_start|>[1, 2]<|tool_call_end|>",
        "<|tool_call_start|>[f(1)]<|tool_call_end|>",
        "<|tool_call_start|>[f(a=open('x'))]<|tool_call_end|>",
        "<|tool_call_start|>[]<|tool_call_end|>",
        "<|tool_call_start|>f(a='x<|tool_call_end|>",
    ],
)
def test_what_lfm2_does_not_write_is_text(answer: str) -> None:
    assert parse(parser("lfm2"), answer) == text(answer)


def test_lfm2_writes_json_too() -> None:
    answer = '<|tool_call_start|>[{"name": "f", "arguments": {"a": 1}}]<|tool_call_end|> ok'
    assert parse(parser("lfm2"), answer) == F + text("ok")


def test_a_tag_inside_a_value_does_not_end_it() -> None:
    invoke = '<minimax:tool_call><invoke name="get_weather"><parameter name="city">{}</parameter></invoke>'
    value = 'say </parameter> and <parameter name="x">y</parameter>.'
    assert parse(parser("minimax_m2"), invoke.format(value)) == call("get_weather", json.dumps({"city": value}))


def test_json_calls_of_different_shapes() -> None:
    call = '{"name": "f", "arguments": {"a": 1}}'
    for answer in (f"<|tool_call|>[{call}]", f"<tool_call>[{call}]"):
        assert parse(parser("granite"), answer) == F
    for answer in (f"functools[{call}]", f"<|tool_call|>{call}<|/tool_call|>"):
        assert parse(parser("phi4_mini_json"), answer) == F
    assert parse(parser("phi4_mini_json"), "import functools\n") == text("import functools\n")
    assert parse(parser("apertus"), '<|tools_prefix|>[{"f": 1}]<|tools_suffix|>') == text(
        '<|tools_prefix|>[{"f": 1}]<|tools_suffix|>'
    )


def test_minimax_m3_reads_lists_and_objects_in_tags() -> None:
    tags = '<tool_call>\n|<invoke name="get_weather">|<where>|<zip>018|</zip>|<no>|</no>|</where>|<tags>|</tags>'
    answer = f"|{tags}|<size>\n|<item>1|</item>\n|</size>|</invoke>|</tool_call>".replace("|", "]<]minimax[>[")
    start, arguments = parse(parser("minimax_m3"), answer)
    assert start == CallStart("get_weather")
    assert isinstance(arguments, CallArguments)
    assert json.loads(arguments.text) == {"where": {"zip": "018", "no": ""}, "tags": [], "size": [1]}


@pytest.mark.parametrize("items", [{"type": "string"}, {"$ref": "#/$defs/text"}])
def test_minimax_m3_lists_that_may_be_null_keep_the_types_of_their_items(items: dict[str, str]) -> None:
    tags = {"anyOf": [{"type": "array", "items": items}, {"type": "null"}]}
    tools = {"f": {"properties": {"tags": tags}, "$defs": {"text": {"type": "string"}}}}
    answer = '|<tool_call>|<invoke name="f">|<tags>|<item>5|</item>|</tags>|</invoke>|</tool_call>'
    family = Parsers("minimax_m3").family(tools, "")
    assert family is not None
    assert parse(AnswerParser(family), answer.replace("|", "]<]minimax[>[")) == call("f", '{"tags": ["5"]}')


def test_a_call_without_its_end_ends_with_its_block() -> None:
    invoke = '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
    answer = f"{invoke}</minimax:tool_call>ok"
    assert parse(parser("minimax_m2"), answer) == call("get_weather", '{"city": "Oslo"}') + text("ok")


def test_kimi_k3_reads_a_call_as_json() -> None:
    tags = '[call tool="f" index="1"|[json type="object"|{"a": 1}]json|]call|'
    answer = tags.replace("[", "<|open|>").replace("]", "<|close|>").replace("|{", "<|sep|>{")
    answer = answer.replace('"1"|', '"1"<|sep|>').replace("json|", "json<|sep|>").replace("call|", "call<|sep|>")
    assert parse(parser("kimi_k3"), answer) == F


ATEM = '<atem:function_calls><atem:invoke name="f"><atem:parameter name="a">1</atem:parameter></atem:invoke>'


def test_muse_writes_messages_to_itself_the_user_and_functions() -> None:
    answer = f" to=self<|message|>Hmm.<|eom|><|start|>assistant to=f<|message|>{ATEM}</atem:function_calls><|eot|>"
    assert parse(parser("muse_glimmer", "muse_glimmer"), answer) == (Reasoning("Hmm."), *F)
    assert parse(parser("muse_glimmer"), "<|message|>So.<|eot|>") == text("So.")
    for other in ("Hello", " to=user without", "<|start|>assistant", "to=a b<|message|>c"):
        assert parse(parser("muse_glimmer"), other) == text(other)
    without_tools = parse(parser(None, "muse_glimmer"), f" to=f<|message|>{ATEM}</atem:function_calls>")
    assert without_tools == text(f"{ATEM}</atem:function_calls>")
