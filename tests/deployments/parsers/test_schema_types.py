"""Which types a tool's schema allows for a value that a model writes as text, also behind references."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from deployments.parsers.answer_parser import AnswerParser
from deployments.parsers.events import CallArguments
from deployments.parsers.registry import Parsers
from deployments.parsers.schema_types import ANY, SchemaPart
from tests.deployments.parsers.shapes import parse

DEFS: dict[str, Any] = {
    "Zip": {"type": "string", "pattern": "^[0-9]+$"},
    "Count": {"type": "integer"},
    "Alias": {"$ref": "#/$defs/Zip"},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Either": {"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]},
    "a/b c~": {"type": "string"},
    "Named": {"$anchor": "named", "type": "string"},
    "Apart": {"$id": "https://example.com/apart", "$ref": "#/$defs/Zip", "$defs": {"Zip": {"type": "integer"}}},
    "Beside": {"$id": "beside", "$ref": "https://example.com/apart#/$defs/Zip"},
    "Pattern": {"pattern": "^[0-9]+$"},
}
STRING, NUMBER = {"string"}, {"number", "integer"}
CASES: list[tuple[dict[str, Any], set[str]]] = [
    ({"$ref": "#/$defs/Zip"}, STRING),
    ({"$ref": "#/$defs/Alias"}, STRING),
    ({"$ref": "#/$defs/Count"}, {"integer"}),
    ({"$ref": "#/$defs/Either"}, {"string", "null"}),
    ({"$ref": "#/$defs/a~1b%20c~0"}, STRING),
    ({"$ref": "#/$defs/Zip", "description": "a zip"}, STRING),
    ({"allOf": [{"$ref": "#/$defs/Zip"}]}, STRING),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, STRING),
    ({"allOf": [{"minLength": 1}, {"type": "string"}]}, STRING),
    ({"type": ["string", "null"], "allOf": [{"$ref": "#/$defs/Zip"}]}, STRING),
    ({"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]}, {"string", "null"}),
    ({"oneOf": [{"$ref": "#/$defs/Zip"}, {"$ref": "#/$defs/Count"}]}, {"string", "integer"}),
    ({"enum": ["1", "2"]}, STRING),
    ({"enum": ["1", None]}, {"string", "null"}),
    ({"enum": [1, 2]}, {"integer"}),
    ({"const": "12345"}, STRING),
    ({"const": True}, {"boolean"}),
    ({"type": "string", "enum": ["1", 2]}, STRING),
    ({"anyOf": [{"const": "1"}, {"const": "2"}]}, STRING),
    ({"type": "string", "nullable": True}, {"string", "null"}),
    ({"allOf": [{"$ref": "#/$defs/Zip"}], "nullable": True}, {"string", "null"}),
    ({"$ref": "#named"}, STRING),
    ({"$dynamicRef": "#named"}, STRING),
    ({"$ref": "#/$defs/Apart"}, {"integer"}),  # its own references start from it
    ({"$ref": "https://example.com/apart"}, {"integer"}),
    ({"$ref": "#/$defs/Beside"}, {"integer"}),
    ({"$ref": "beside"}, {"integer"}),
    ({"if": {"minLength": 3}, "then": {"type": "string"}, "else": {"type": "null"}}, {"string", "null"}),
    ({"$ref": "#/$defs/Pattern"}, STRING),  # nothing names a type, but a pattern is about text
    ({"minimum": 1}, NUMBER),
    ({"properties": {"b": {"type": "string"}}}, {"object"}),
    ({"items": {"type": "string"}}, {"array"}),
    ({"type": "number"}, NUMBER),
    ({"type": "integer", "enum": [1.0, 2.0]}, {"integer"}),
    ({"type": "integer", "const": "1"}, {"integer"}),  # a contradiction; the first keyword counts
    ({"$ref": "#Color"}, {ANY}),  # an anchor
    ({"not": {"type": "number"}}, {"boolean", "string", "array", "object", "null"}),
    ({"not": {"type": ["null", "object", "array"], "title": "no"}}, {"boolean", "integer", "number", "string"}),
    ({"not": {"type": "number", "maximum": 3}}, set()),
    ({"type": ["string", "integer"], "not": {"type": "integer"}}, STRING),
    ({"if": {"type": ["number", "boolean", "null", "object", "array"]}, "then": False}, STRING),
    ({"if": {"type": "string"}, "else": False}, STRING),
    ({"type": ["integer", "string"]}, {"integer", "string"}),
    ({}, set()),
    ({"description": "anything"}, set()),
    ({"$ref": "#/$defs/Loop"}, {ANY}),
    ({"$ref": "#/$defs/Missing"}, {ANY}),
    ({"$ref": "https://example.com/zip"}, {ANY}),
    ({"allOf": [{"minLength": 1}]}, STRING),
    ({"allOf": [{"description": "anything"}]}, {ANY}),
]


def types_of(schema: dict[str, Any], document: dict[str, Any]) -> set[str]:
    return SchemaPart(document, ((schema, document),)).types


@pytest.mark.parametrize(
    ("schema", "expected"), CASES, ids=lambda value: json.dumps(value) if isinstance(value, dict) else ""
)
def test_the_types_of_a_schema(schema: dict[str, Any], expected: set[str]) -> None:
    assert types_of(schema, {"$defs": DEFS}) == expected


def arguments(parameters: Mapping[str, Any], value: str) -> Any:
    family = Parsers("qwen3_coder", None).family({"f": parameters}, "")
    assert family is not None
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    events = parse(AnswerParser(family), text)
    return json.loads("".join(event.text for event in events if isinstance(event, CallArguments)))


ONE_OR_TWO = {"enum": ["1", 2]}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (ONE_OR_TWO, "1", "1"),
        (ONE_OR_TWO, "2", 2),
        (ONE_OR_TWO, "2.0", 2.0),
        (ONE_OR_TWO, "one", "one"),
        ({"enum": ["1", 1]}, "1", 1),  # either is right
        ({"enum": [True, "false", None]}, "false", "false"),
        ({"enum": [True, "false", None]}, "true", True),
        ({"enum": [True, "false", None]}, "null", None),
        ({"enum": [True, "1"]}, "1", "1"),
        ({"enum": [False, 1, "0"]}, "0", "0"),
        ({"enum": [[1], "[2]"]}, "[2]", "[2]"),
        ({"enum": [{}, "{}"]}, "{}", {}),
        ({"enum": [7, "null"]}, "null", "null"),
        ({"anyOf": [{"const": "1"}, {"const": 2}]}, "1", "1"),
        ({"anyOf": [{"const": "1"}, {"const": 2}]}, "2", 2),
        ({"anyOf": [{"type": "integer"}, {"const": "1"}]}, "3", 3),
        ({"$ref": "#/$defs/Mixed"}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/Mixed"}, {"type": ["string", "integer"]}]}, "1", "1"),
        ({"type": ["integer", "string"], "enum": ["1", 2]}, "1", "1"),
        ({"if": {}, "then": {"enum": ["1"]}, "else": {"enum": [2]}}, "1", "1"),
    ],
    ids=repr,
)
def test_listed_values_tell_what_a_text_stands_for(schema: dict[str, Any], text: str, expected: Any) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": {"Mixed": ONE_OR_TWO}}
    value = arguments(parameters, text)["a"]
    assert value == expected
    assert type(value) is type(expected)
    if text != "one":
        Draft202012Validator(parameters).validate({"a": value})


@pytest.mark.parametrize(("text", "expected"), [("1", "1"), ("2", 2)])
@pytest.mark.parametrize(
    ("family", "written"),
    [
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">{}</parameter></invoke>'),
        ("minimax_m3", '|<tool_call>|<invoke name="f">|<a>{}|</a>|</invoke>|</tool_call>'),
        ("openai", "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}<|call|>"),
    ],
)
def test_every_format_of_text_looks_at_listed_values(family: str, written: str, text: str, expected: Any) -> None:
    parameters = {"type": "object", "properties": {"a": ONE_OR_TWO}}
    found = Parsers(family, None).family({"f": parameters}, "")
    assert found is not None
    events = parse(
        AnswerParser(found),
        written.format(text).replace("|<", "]<]minimax[>[<") if "m3" in family else written.format(text),
    )
    call = json.loads("".join(event.text for event in events if isinstance(event, CallArguments)))
    assert call == {"a": expected}


@pytest.mark.parametrize(
    "parameters",
    [
        {"unevaluatedProperties": {"type": "string"}},
        {"dependentSchemas": {"a": {"properties": {"a": {"type": "string"}}}}},
    ],
)
def test_what_other_keywords_say_about_a_property(parameters: dict[str, Any]) -> None:
    assert arguments(parameters, "12345") == {"a": "12345"}


@pytest.mark.parametrize("schema", [schema for schema, types in CASES if types >= STRING and "integer" not in types])
@pytest.mark.parametrize("value", ["12345", "1", "2"])
def test_digits_stay_text_where_the_schema_allows_no_number(schema: dict[str, Any], value: str) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": DEFS}
    call = arguments(parameters, value)
    assert call == {"a": value}
    if Draft202012Validator(parameters).is_valid({"a": value}):
        assert Draft202012Validator(parameters).is_valid(call)


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/Args"},
        {"allOf": [{"$ref": "#/$defs/Args"}]},
        {"anyOf": [{"properties": {"b": {}}}, {"$ref": "#/$defs/Args"}]},
        {"properties": {"b": {"type": "integer"}}, "additionalProperties": {"$ref": "#/$defs/Zip"}},
        {"properties": {"b": {}}, "patternProperties": {"^[a-z]$": {"$ref": "#/$defs/Zip"}}},
        {"properties": {"a": {}}, "allOf": [{"$ref": "#/$defs/Args"}]},
        {"if": {"required": ["b"]}, "then": {"$ref": "#/$defs/Args"}},
        {"$ref": "#/$defs/Own"},
    ],
    ids=json.dumps,
)
def test_properties_may_be_behind_references_too(parameters: dict[str, Any]) -> None:
    defs = DEFS | {"Args": {"properties": {"a": {"$ref": "#/$defs/Zip"}}}}
    own = {"$id": "own", "properties": {"a": {"$ref": "#/$defs/Text"}}, "$defs": {"Text": {"type": "string"}}}
    defs |= {"Own": own, "Text": {"type": "integer"}}
    assert arguments(parameters | {"$defs": defs}, "12345") == {"a": "12345"}


def test_a_long_chain_of_references_ends() -> None:
    defs: dict[str, Any] = {f"s{i}": {"$ref": f"#/$defs/s{i + 1}"} for i in range(2000)} | {"s2000": {"type": "string"}}
    chain = {"$ref": "#/$defs/s0"}
    assert types_of(chain, {"$defs": defs}) == {ANY}
    assert arguments({"properties": {"a": chain}, "$defs": defs}, "1") == {"a": 1}
    assert arguments(chain | {"$defs": defs}, "1") == {"a": "1"}


def test_a_reference_may_count_in_a_list() -> None:
    root: dict[str, Any] = {"anyOf": [{"type": "null"}, {"type": "string"}]}
    assert types_of({"$ref": "#/anyOf/1"}, root) == STRING
    for beyond in ("2", "1" * 5000):
        assert types_of({"$ref": f"#/anyOf/{beyond}"}, root) == {ANY}


def test_references_are_followed_once_each() -> None:
    """Each of forty schemas refers to the next one twice: a trillion ways, if they were followed each time."""
    defs: dict[str, Any] = {
        f"s{i}": {"anyOf": [{"$ref": f"#/$defs/s{i + 1}"}, {"$ref": f"#/$defs/s{i + 1}"}]} for i in range(40)
    }
    defs["s40"] = {"type": "string"}
    assert types_of({"$ref": "#/$defs/s0"}, {"$defs": defs}) == STRING
    properties = {"properties": {"a": {"$ref": "#/$defs/s0"}}, "anyOf": [{"$ref": "#/$defs/s0"}, {"$ref": "#"}]}
    assert arguments(properties | {"$defs": defs}, "1") == {"a": "1"}


def test_an_id_was_an_anchor_until_draft_7() -> None:
    document = {"definitions": {"Zip": {"$id": "#zip", "$ref": "#/definitions/Digits"}, "Digits": {"type": "string"}}}
    assert types_of({"$ref": "#zip"}, document) == STRING


def test_an_integer_or_a_text_is_no_other_number() -> None:
    parameters = {"properties": {"a": {"type": ["integer", "string"]}}}
    assert [arguments(parameters, value) for value in ("5", "5.5", "5.0")] == [{"a": 5}, {"a": "5.5"}, {"a": 5.0}]


@pytest.mark.parametrize("uri", ["http://[", "//", "#" * 9, "#/%", "?", "\x00"])
def test_references_that_are_none_limit_nothing(uri: str) -> None:
    document = {"$id": "http://[x", "$defs": {"a": {"$id": "http://[y", "$ref": uri}}}
    assert types_of({"$ref": "#/$defs/a"}, document) == types_of({"$ref": uri}, document) == {ANY}


def test_a_large_document_is_not_searched_to_its_end() -> None:
    document = {"$defs": {f"s{i}": {"minLength": 1} for i in range(5000)} | {"last": {"$anchor": "x", "type": "null"}}}
    assert types_of({"$ref": "#x"}, document) == {ANY}
