"""Schemas before they are compiled: an unknown format limits nothing, and everything else stays as strict as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from engine.errors import RequestError
from engine.options.structured_outputs import StructuredOutputsParams
from engine.structured_outputs.compiler import GrammarCompiler
from engine.structured_outputs.schemas import (
    map_schemas,
    without_unknown_formats,
    without_unknown_formats_in_grammar,
)
from engine.text.tokenizer import Tokenizer

UNKNOWN = (
    "password binary byte file-path directory-path uri-reference regex json-pointer relative-json-pointer iri "
    "iri-reference uri-template idn-email idn-hostname int32 int64 float double color phone url base64 my-own x"
    + "y"
    * 99
).split()
OPEN: dict[str, Any] = {"type": "string", "maxLength": 3}


def fits(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, text: str) -> bool:
    grammar = compiler.compile(StructuredOutputsParams(json=schema))
    return all(map(grammar.accept, [*tokenizer.encode(text, add_special_tokens=False), 0]))


def test_an_unknown_format_is_an_annotation(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {name: OPEN | {"format": name} for name in UNKNOWN}}
    assert without_unknown_formats(schema) == {"type": "object", "properties": dict.fromkeys(UNKNOWN, OPEN)}
    annotated = {"type": "object", "properties": {"a": OPEN | {"format": "password"}}, "required": ["a"]}
    annotated["additionalProperties"] = False
    assert fits(compiler, tokenizer, annotated, '{"a": "abc"}')
    assert not fits(compiler, tokenizer, annotated, '{"a": "abcd"}')
    assert fits(compiler, tokenizer, json.dumps(annotated), '{"a": "abc"}')


def test_the_known_formats_are_those_of_llguidance() -> None:
    known = ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"]
    schemas = [{"type": "string", "format": name} for name in (*known, *UNKNOWN)]
    compiled = [LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema)) == "" for schema in schemas]
    assert compiled == [without_unknown_formats(schema) == schema for schema in schemas]
    assert sum(compiled) == len(known)


def test_llguidance_is_not_asked_about_each_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLMatcher, "validate_grammar", lambda *_: pytest.fail("it takes long for many names"))
    schema = {"properties": {f"p{index}": {"format": f"f{index}"} for index in range(300)}}
    assert without_unknown_formats(schema) == {"properties": {f"p{index}": {} for index in range(300)}}


def test_a_known_format_is_kept(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"anyOf": [{"type": "string", "format": "date"}, {"type": "number", "format": "double"}]}
    assert fits(compiler, tokenizer, schema, '"2026-11-25"')
    assert fits(compiler, tokenizer, schema, "1.5")
    assert not fits(compiler, tokenizer, schema, '"soon"')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True, "items": {"type": "string", "format": "password"}},
        {"type": "string", "format": "password", "pattern": "("},
        {"type": "object", "properties": {"a": {"format": "regex", "not": {"type": "string"}}}},
        {"type": "string", "format": 5},
    ],
    ids=json.dumps,
)
def test_nothing_else_becomes_lenient(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="cannot be compiled"):
        compiler.compile(StructuredOutputsParams(json=schema))


PASSWORD = {"format": "password"}


def test_schemas_in_a_grammar_have_annotations_too(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schemas = (
        json.dumps(OPEN | {"format": "password"}),
        json.dumps({"enum": ["%json {", "a"], "format": "regex"}, indent=1),
    )
    grammar = f'start: "a" %json {schemas[0]} inner\ninner: %json{schemas[1]} | %json {{"type": "integer"}}'
    params = StructuredOutputsParams(grammar=grammar)
    for text, fits_it in (('a"abc""a"', True), ('a"abc"7', True), ('a"abc""%json {"', True), ('a"abcd"7', False)):
        compiled = compiler.compile(params)
        ids = [*tokenizer.encode(text, add_special_tokens=False), 0]
        assert all(map(compiled.accept, ids)) == fits_it, text
    assert without_unknown_formats_in_grammar("start: %json {") == "start: %json {"
    nested = "start: %json " + '{"a":' * 3000
    assert without_unknown_formats_in_grammar(nested) == nested


def test_data_and_names_are_no_schemas() -> None:
    data = {"enum": [PASSWORD], "const": PASSWORD, "default": PASSWORD, "examples": [PASSWORD]}
    names = {"properties": {"format": {"enum": [PASSWORD]}, "enum": {}, "default": {}}}
    assert without_unknown_formats(data | names) == data | names


@pytest.mark.parametrize("name", ["default", "example", "examples", "const", "enum"])
def test_data_that_a_reference_points_to_is_a_schema(name: str, compiler: GrammarCompiler) -> None:
    for pointer in (f"#/components/schemas/{name}", f"#/$defs/a/{name}", f"#/x/{name}/inner", f"#/x/{name}/a~1%25"):
        place: dict[str, Any] = dict(PASSWORD)
        for part in reversed(pointer.replace("a~1%25", "a~1%").split("/")[1:]):
            place = {part.replace("~1", "/"): place}
        schema = place | {"$ref": pointer}
        assert "format" not in json.dumps(without_unknown_formats(schema))
        compiler.compile(StructuredOutputsParams(json=schema))
    within = {"$defs": {"a": {"$id": "https://example.com/a", "$ref": f"#/b/{name}", "b": {name: PASSWORD}}}}
    assert "format" not in json.dumps(without_unknown_formats(within))


def test_every_place_of_a_schema_is_reached() -> None:
    keywords = [
        "additionalProperties",
        "items",
        "contains",
        "not",
        "if",
        "then",
        "else",
        "propertyNames",
        "unevaluatedItems",
        "contentSchema",
    ]
    some = ["allOf", "anyOf", "oneOf", "prefixItems", "items"]
    named = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"]
    for key, value, left in (
        *((key, PASSWORD, {}) for key in keywords),
        *((key, [PASSWORD, True], [{}, True]) for key in some),
        *((key, {"enum": PASSWORD, "b": ["a"]}, {"enum": {}, "b": ["a"]}) for key in named),
        ("x-definitions", {"a": PASSWORD}, {"a": {}}),  # what a reference may point to
    ):
        assert without_unknown_formats({"items": {key: value}}) == {"items": {key: left}}


def test_a_schema_that_is_left_alone_is_so_with_its_parts() -> None:
    schema = {"$defs": {"a": {"$id": "x", "items": PASSWORD}, "b": PASSWORD}}
    changed = map_schemas(schema, lambda part: None if "$id" in part else part | {"title": "t"})
    assert changed["$defs"] == {"a": {"$id": "x", "items": PASSWORD}, "b": PASSWORD | {"title": "t"}}
    assert schema == {"$defs": {"a": {"$id": "x", "items": PASSWORD}, "b": PASSWORD}}
