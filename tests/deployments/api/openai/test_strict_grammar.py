"""The grammar of text that may have calls of strict tools, compiled by llguidance for the demo model's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.api.openai.tool_grammar import forced_calls, strict_calls
from deployments.api.openai.tools import Tool
from deployments.parsers.families.json_blocks import HERMES_MARKERS as MARKERS
from engine.options.structured_outputs import StructuredOutputsParams
from engine.structured_outputs.compiler import GrammarCompiler
from engine.structured_outputs.grammar import Grammar
from engine.text.tokenizer import Tokenizer
from tests.deployments.api.openai.test_tool_requests import CHAT
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import FakeEngines
from tests.waiting import HANG_S

MODEL = Path(__file__).resolve().parents[4] / "demo" / "model"
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/C"}}, "required": ["city"]}
CITY |= {"additionalProperties": False, "$defs": {"C": {"enum": ["Oslo", "東京"]}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}}\n</tool_call>'
TEXTS = [
    ("Hello.\n", True),
    ("a <tool", True),
    ("<think>\nHm\n</think>\n", True),
    (CALL, True),
    (f"So: {CALL}\n{CALL} ok", True),
    (CALL.replace("Oslo", "東京"), True),
    (CALL.replace('{"city": "Oslo"}', '{"city":\n  "Oslo"}'), True),
    (CALL.replace("Oslo", "Bonn"), False),
    (CALL.replace('"f"', '"h"'), False),
    (CALL.replace('{"city": "Oslo"}', "{}"), False),
    (CALL.replace('"f"', '"g.2/ü"'), True),
    ('<tool_call>\n{"name": "g.2/ü", "arguments": {"x": [1]}}\n</tool_call>', True),
    ("<tool_call> is a marker", False),
    (f"{CALL}{CALL.replace('Oslo', 'x')}", False),
]


def _tool(name: str, strict: bool | None, parameters: Any = None) -> Tool:
    function = {"name": name, "strict": strict, "parameters": parameters}
    return Tool.model_validate({"type": "function", "function": function})


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(MODEL, len(Tokenizer(MODEL)), [0], timeout_s=HANG_S)
    yield compiler
    compiler.close()


@pytest.mark.parametrize(("text", "fits"), TEXTS)
def test_text_is_free_and_calls_are_not(compiler: GrammarCompiler, text: str, fits: bool) -> None:
    source = strict_calls([_tool("f", True, CITY), _tool("g.2/ü", None, CITY)], MARKERS)
    grammar: Grammar = compiler.compile(StructuredOutputsParams(grammar=source))
    ids = Tokenizer(MODEL).encode(text, add_special_tokens=False)
    assert all(map(grammar.accept, ids)) == fits


def test_formats_of_parameters_and_schemas_with_an_id_compile(compiler: GrammarCompiler) -> None:
    zipped = {"type": "string", "format": "zip", "maxLength": 2}
    parameters = {"$id": "https://example.com/f", "properties": {"a": {"$ref": "#/$defs/Z"}}, "$defs": {"Z": zipped}}
    tools = [_tool("f", True, parameters), _tool("g", True, {"properties": {"a": zipped}})]
    text = '[{"name": "f", "arguments": {"a": "ab"}}]'
    for params, answer in (
        (StructuredOutputsParams(grammar=strict_calls(tools, MARKERS)), CALL.replace('"city": "Oslo"', '"a": "ab"')),
        (forced_calls(tools, "required"), text),
        (forced_calls(tools, "required"), text.replace('"f"', '"g"')),
    ):
        assert params is not None
        for length, fits in (("ab", True), ("abc", False)):
            grammar = compiler.compile(params)
            ids = Tokenizer(MODEL).encode(answer.replace("ab", length), add_special_tokens=False)
            assert all(map(grammar.accept, ids)) == fits


def test_without_a_strict_tool_there_is_none() -> None:
    assert strict_calls([_tool("f", None, CITY), _tool("g", False)], MARKERS) is None


def test_a_request_with_a_strict_tool_has_the_grammar(
    open_client: OpenClient, engines: FakeEngines, tokenizer_path: Path
) -> None:
    api: TestClient = open_client(model=str(tokenizer_path), tool_parser="hermes")
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    for tools, is_strict in (([strict], True), (CHAT["tools"], False)):
        assert api.post("/v1/chat/completions", json=CHAT | {"tools": tools}).status_code == 200
        form = engines.calls[-1][0].params.structured_outputs
        assert (form is not None and "%json" in str(form.grammar)) == is_strict
