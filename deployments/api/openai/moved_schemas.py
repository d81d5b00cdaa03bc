"""moved_schemas: the schemas of several tools as definitions of one schema, each with the meaning that it has alone.

References that start from a schema, as ``#/$defs/a`` does, get its place in the whole. Below an ``$id``, references
start from there (JSON Schema 2020-12, core, 8.2.1), wherever that is, so nothing is changed. But names are global: if
two tools have the same ``$id`` or anchor, references of one lead to the other. Such names are then replaced by places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from deployments.parsers.schema_references import Schema, is_resource, target
from engine.structured_outputs.schemas import BY_NAME, DATA, map_schemas, referenced

__all__ = ["moved_schemas", "pointer"]

_ANCHORS = ("$anchor", "$dynamicAnchor")
_OLD_DRAFTS = ("/draft-03/", "/draft-04/", "/draft-06/", "/draft-07/")  # their ids are anchors, too, or named ``id``
_NAMES = ("$id", "id", *_ANCHORS)


def moved_schemas(schemas: Mapping[str, Schema], place: str) -> dict[str, Any]:
    """Return the schemas by name, as they are once they stand side by side at ``place``, such as ``#/$defs``."""
    names = {tool: set(_names(schema)) for tool, schema in schemas.items()}
    num_uses = Counter(name for own in names.values() for name in own)
    moved: dict[str, Any] = {}
    for tool, schema in schemas.items():
        are_unique = all(name and num_uses[name] == 1 for name in names[tool]) and not _has_old_ids(schema)
        moved[tool] = (_moved if are_unique else _without_names)(schema, place + pointer(tool))
    return moved


def pointer(name: str) -> str:
    """Return a name as a part of a JSON pointer, as a reference writes it."""
    return "/" + quote(name.replace("~", "~0").replace("/", "~1"), safe="~$")


def _moved(schema: Schema, place: str) -> Any:
    """Return a schema that is now at ``place``, with its references to itself adjusted."""

    def move(part: dict[str, Any]) -> dict[str, Any] | None:
        if "$id" in part:
            return None
        reference = part.get("$ref")
        if isinstance(reference, str) and (reference in ("", "#") or reference.startswith("#/")):
            part["$ref"] = place + reference[1:]
        return part

    return map_schemas(schema, move)


def _names(schema: Schema) -> Iterator[str]:
    """Yield the names that a schema gives to its parts; an empty one for what cannot be a name."""
    names: list[Any] = []

    def note(part: dict[str, Any]) -> dict[str, Any]:
        names.extend(part[key] for key in ("$id", *_ANCHORS) if key in part)
        return part

    map_schemas(schema, note)
    for name in names:
        yield name if isinstance(name, str) and not name.startswith("#") else ""


def _has_old_ids(schema: Schema) -> bool:
    draft = schema.get("$schema")
    return isinstance(draft, str) and any(old in draft for old in _OLD_DRAFTS) and "id" in schema


def _without_names(document: Schema, place: str) -> Any:
    """Return a schema that is now at ``place``, without names, and with references to places."""
    pointed = referenced(document)
    places = {id(part): place + path for path, part in _parts(document, "")}

    def moved(part: Any, base: Schema) -> Any:
        if isinstance(part, list):
            return [moved(inner, base) for inner in part]
        if not isinstance(part, Mapping):
            return part
        base = part if is_resource(part) else base
        kept = {key: value for key, value in part.items() if not (key in _NAMES and isinstance(value, str | None))}
        copied = {
            key: value if key in DATA and id(value) not in pointed else inner(key, value, base)
            for key, value in kept.items()
        }
        if isinstance(reference := part.get("$ref"), str):
            copied["$ref"] = places.get(id(target(reference, base, document)[0]), reference)
        return copied

    def inner(key: str, value: Any, base: Schema) -> Any:
        if key in BY_NAME and isinstance(value, Mapping):
            return {name: moved(part, base) for name, part in value.items()}
        return moved(value, base)

    return moved(document, document)


def _parts(value: Any, path: str) -> Iterator[tuple[str, Schema]]:
    """Yield all objects in a schema, each with the JSON pointer to it."""
    if isinstance(value, Mapping):
        yield path, value
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from _parts(part, path + pointer(str(key)))
