"""Tools side by side in one schema: each keeps the meaning that its schema has alone, whatever names it uses."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from deployments.api.openai.moved_schemas import moved_schemas
from deployments.api.openai.tool_grammar import forced_calls
from deployments.api.openai.tools import Tool
from engine.structured_outputs.grammar import Grammar, new_matcher
from engine.structured_outputs.tokens import GrammarTokens
from tests.engine.text.tokenizers import load_kind, saved_kind

KIND, EOS = "byte-level", 2
TEXT, COUNT = {"type": "string"}, {"type": "integer"}
DRAFT_7, DRAFT_4 = ({"$schema": f"http://json-schema.org/draft-0{number}/schema#"} for number in (7, 4))


def _tool(reference: str, **fields: Any) -> dict[str, Any]:
    """Return parameters with one argument, ``a``, that is behind a reference."""
    properties = {"properties": {"a": {"$ref": reference}}, "required": ["a"], "additionalProperties": False}
    return {"type": "object"} | properties | fields


def _pair(reference: str, definition: dict[str, Any], **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two tools whose names are the same; the argument of one is a text, that of the other a number."""
    one, other = (_tool(reference, **{"$defs": {"b": definition | kind}}, **fields) for kind in (TEXT, COUNT))
    return one, other


NUMBERED = _tool("#/$defs/b", **{"$defs": {"b": COUNT}})
PAIRS = {
    "anchor": _pair("#n", {"$anchor": "n"}),
    "id": _pair("#/$defs/b", {}, **{"$id": "https://example.com/p"}),
    "relative id": _pair("#/$defs/b", {}, **{"$id": "p"}),
    "reference with the id": _pair("https://example.com/p#/$defs/b", {}, **{"$id": "https://example.com/p"}),
    "id of a part": _pair("part", {"$id": "part"}),
    "id of a part with parts": (
        _tool("#/$defs/b", **{"$defs": {"b": {"$id": "q", "$ref": "#/$defs/c", "$defs": {"c": TEXT}}, "c": COUNT}}),
        _tool("#/$defs/b", **{"$defs": {"b": {"$id": "q", "$ref": "#/$defs/c", "$defs": {"c": COUNT}}, "c": TEXT}}),
    ),
    "empty id": (_tool("#/$defs/b", **{"$id": "", "$defs": {"b": TEXT}}), NUMBERED),
    "no id": (_tool("#/$defs/b", **{"$id": None, "$defs": {"b": TEXT}}), NUMBERED),
    "draft 7, anchor": (_tool("#b", **DRAFT_7, definitions={"b": {"$id": "#b"} | TEXT}), NUMBERED),
    "draft 7, anchor and place": (
        _tool("#/definitions/b", **DRAFT_7, definitions={"b": {"$id": "#b", "$ref": "#/definitions/c"}, "c": TEXT}),
        NUMBERED,
    ),
    "draft 4": (_tool("#/definitions/b", **DRAFT_4, id="http://example.com/x", definitions={"b": TEXT}), NUMBERED),
    "a name that is a keyword for data": (
        _tool("#/x/default", x={"default": {"$ref": "#/x/enum"}, "enum": TEXT}),
        _tool("#/x/default", x={"default": {"$ref": "#/x/enum"}, "enum": COUNT}),
    ),
    "such a name within an id": (
        _tool("#/x/default", **{"$id": "p", "x": {"default": {"$ref": "#/x/enum"}, "enum": TEXT}}),
        _tool("#/x/default", **{"$id": "p", "x": {"default": {"$ref": "#/x/enum"}, "enum": COUNT}}),
    ),
    "empty reference": (
        _tool("#/$defs/b", **{"$defs": {"b": {"anyOf": [TEXT, {"$ref": ""}]}}}),
        _tool("#/$defs/b", **{"$defs": {"b": {"anyOf": [COUNT, {"$ref": ""}]}}}),
    ),
}


@cache
def _tokens() -> GrammarTokens:
    return GrammarTokens.load(saved_kind(KIND), len(load_kind(KIND)), [EOS])


def _fits(tools: dict[str, Any], name: str, arguments: Any) -> bool:
    described = [{"type": "function", "function": {"name": name, "parameters": tools[name]}} for name in tools]
    params = forced_calls([Tool.model_validate(tool) for tool in described], "required")
    assert params is not None
    vocabulary = _tokens().vocabulary()
    grammar = Grammar(new_matcher(_tokens().new_tokenizer(), vocabulary, params), vocabulary)
    text = json.dumps([{"name": name, "arguments": arguments}])
    return all(map(grammar.accept, [*load_kind(KIND).encode(text, add_special_tokens=False), EOS]))


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_each_tool_keeps_its_own_schema(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    tools = dict(zip("fg", pair, strict=True))
    assert [_fits(tools, name, {"a": value}) for name in "fg" for value in ("x", 1)] == [True, False, False, True]


def test_an_empty_reference_is_the_whole_schema() -> None:
    assert _fits(dict(zip("fg", PAIRS["empty reference"], strict=True)), "f", {"a": {"a": "x"}})


def test_names_are_kept_where_they_are_of_one_tool_alone() -> None:
    schema = {"$id": "https://example.com/p", "properties": {"a": {"$ref": "#n"}}, "$defs": {"b": {"$anchor": "n"}}}
    assert moved_schemas({"f": schema, "g": {}}, "#/$defs")["f"] == schema


def test_data_and_properties_keep_what_names_would_lose() -> None:
    data = {"$id": "x", "$ref": "#/a", "$anchor": "n"}
    schema = {"$anchor": "n", "enum": [data], "const": data, "properties": {"$id": {}, "id": {}, "$anchor": {}}}
    moved = moved_schemas({"f": schema, "g": {"$anchor": "n"}}, "#/$defs")
    assert moved == {"f": {key: value for key, value in schema.items() if key != "$anchor"}, "g": {}}
