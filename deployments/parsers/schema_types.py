"""Which JSON types a schema allows, for formats that write values as text. No one has checked the schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias
from urllib.parse import unquote

__all__ = ["ANY", "Schema", "Tools", "items_schema", "property_schema", "types_of"]

ANY = "any"  # what a schema refers to or combines, but does not limit
Schema: TypeAlias = Mapping[str, Any]
Tools: TypeAlias = Mapping[str, Schema]  # name -> JSON schema of the parameters
_MAX_DIGITS = 9  # of an index; int() refuses thousands
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const")
_MAX_REFERENCES = 64  # that are followed for one value; beyond them anything is allowed
_JSON_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),  # before its base class int
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)


def types_of(schema: Schema, root: Schema) -> set[str]:
    """Return the types of the values that a schema allows, as JSON Schema 2020-12 combines its keywords.

    Args:
        schema: a part of ``root``.
        root: what local references start from.

    Returns:
        Names of JSON types; a number may be an integer, too. Empty if the schema says nothing, ANY alone if what it
        refers to does not limit the type.
    """
    types = _allowed(schema, root, {})
    if types is None:
        return {ANY} if any(key in schema for key in _COMBINED) else set()
    return types


def property_schema(schema: Schema, name: str, root: Schema) -> Schema:
    """Return the schema of an object's property, also behind references and in combined schemas; else an empty one."""
    others: Schema = {}
    for part in _parts(schema, root, set()):
        properties = part.get("properties")
        if isinstance(properties, Mapping) and isinstance(declared := properties.get(name), Mapping):
            return declared
        if isinstance(additional := part.get("additionalProperties"), Mapping):
            others = additional
    return others


def items_schema(schema: Schema, root: Schema) -> Schema:
    """Return the schema of a list's items, also behind references and in combined schemas; else an empty one."""
    declared = (part.get("items") for part in _parts(schema, root, set()))
    return next((items for items in declared if isinstance(items, Mapping)), {})


def _parts(schema: Schema, root: Schema, seen: set[str]) -> Iterator[Schema]:
    """Yield a schema and those that it refers to and combines, each reference once."""
    yield schema
    if (reference := _local_reference(schema)) is not None and reference not in seen and len(seen) < _MAX_REFERENCES:
        seen.add(reference)
        yield from _parts(_target(reference, root), root, seen)
    for key in ("allOf", "anyOf", "oneOf"):
        for part in _schemas(schema.get(key)):
            yield from _parts(part, root, seen)


def _allowed(schema: Schema, root: Schema, known: dict[str, set[str] | None]) -> set[str] | None:
    """Return the allowed types, or None for all.

    Args:
        known: of the references so far, so that none is followed twice; one that is being followed limits nothing.
    """
    limits = [_named(schema), _of_values(schema)]
    if (reference := _local_reference(schema)) is not None and (reference in known or len(known) < _MAX_REFERENCES):
        if reference not in known:
            known[reference] = None
            known[reference] = _allowed(_target(reference, root), root, known)
        limits.append(known[reference])
    limits += [_allowed(part, root, known) for part in _schemas(schema.get("allOf"))]
    for key in ("anyOf", "oneOf"):
        alternatives = [_allowed(part, root, known) for part in _schemas(schema.get(key))]
        limiting = [types for types in alternatives if types is not None]
        limits.append(set().union(*limiting) if limiting else None)
    common: set[str] | None = None
    for types in limits:
        if types is not None:
            # Of a contradiction the first keyword counts, so that it does not make text of numbers.
            common = types if common is None else common & types or common
    return common


def _named(schema: Schema) -> set[str] | None:
    listed = schema.get("type")
    types = {name for name in (listed if isinstance(listed, list) else [listed]) if isinstance(name, str)}
    if "number" in types:
        types.add("integer")
    if types and schema.get("nullable") is True:  # OpenAPI 3.0's name
        types.add("null")
    return types or None


def _of_values(schema: Schema) -> set[str] | None:
    """Return the types of the values that ``enum`` and ``const`` list."""
    values = list(schema["enum"]) if isinstance(schema.get("enum"), list) else []
    if "const" in schema:
        values = [schema["const"]]
    types = {next((name for kind, name in _JSON_TYPES if isinstance(value, kind)), ANY) for value in values}
    if any(isinstance(value, float) and value.is_integer() for value in values):
        types.add("integer")  # JSON Schema 2020-12, core, 4.2.2
    return types or None


def _local_reference(schema: Schema) -> str | None:
    reference = schema.get("$ref")
    is_pointer = isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
    return str(reference) if is_pointer else None


def _target(reference: str, root: Schema) -> Schema:
    """Return what a local reference points to (RFC 6901); an empty schema if there is nothing."""
    target: Any = root
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isdecimal() and len(key) <= _MAX_DIGITS and int(key) < len(target):
            target = target[int(key)]
        else:
            target = target.get(key) if isinstance(target, Mapping) else None
    return target if isinstance(target, Mapping) else {}


def _schemas(value: object) -> list[Schema]:
    return [part for part in value if isinstance(part, Mapping)] if isinstance(value, list) else []
