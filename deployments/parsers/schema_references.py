"""What a reference of a JSON schema points to within its document (JSON Schema 2020-12, core, 8.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias
from urllib.parse import unquote, urljoin

from engine.structured_outputs.schemas import DATA

__all__ = ["Schema", "is_resource", "reference_of", "target"]

Schema: TypeAlias = Mapping[str, Any]
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_IDS = ("$id", "id")  # the second until draft 4
_MAX_DIGITS = 9  # of an index; int() refuses thousands
_MAX_SEARCHED = 1000  # schemas of a document that are searched for a name; no one has checked its size


def reference_of(schema: Schema) -> str | None:
    """Return a schema's reference; None if it has none."""
    references = (schema.get(key) for key in _REFERENCES)
    return next((reference for reference in references if isinstance(reference, str)), None)


def is_resource(schema: Schema) -> bool:
    """Whether references within a schema start from it, since it has an ``$id`` of its own."""
    own = schema.get("$id")
    return isinstance(own, str) and not own.startswith("#")  # until draft 7, that was an anchor


def target(reference: str, base: Schema, document: Schema) -> tuple[Schema, Schema]:
    """Return what a reference points to, and what the references in it start from; an empty schema for nothing.

    Args:
        reference: a URI, whole or in part: ``other#/$defs/a``, ``#name``.
        base: the nearest schema around it that has an ``$id``, or the document.
        document: all that is searched; nothing is loaded.
    """
    uri, _, fragment = reference.partition("#")
    resource = _resource(uri, base, document) if uri else base
    if fragment.startswith("/"):
        schema = _pointed(unquote(fragment), resource)
    else:
        schema = _anchored(unquote(fragment), resource) if fragment else resource
    return schema, schema if is_resource(schema) else resource


def _pointed(pointer: str, resource: Schema) -> Schema:
    """Return the schema at a JSON pointer (RFC 6901)."""
    schema: Any = resource
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and key.isdecimal() and len(key) <= _MAX_DIGITS and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def _anchored(name: str, resource: Schema) -> Schema:
    for schema in _schemas_in(resource):
        if name in (schema.get("$anchor"), schema.get("$dynamicAnchor")) or f"#{name}" in map(schema.get, _IDS):
            return schema
    return {}


def _resource(uri: str, base: Schema, document: Schema) -> Schema:
    """Return the schema whose ``$id`` is a URI, which may be relative to that of ``base``."""
    wanted = (uri, _joined(base, uri))
    resources = (schema for schema in _schemas_in(document) if is_resource(schema))
    return next(
        (schema for schema in resources if schema["$id"] in wanted or _joined(document, schema["$id"]) in wanted), {}
    )


def _joined(base: Schema, uri: str) -> str:
    try:
        return urljoin(base["$id"], uri) if is_resource(base) else uri
    except ValueError:  # it is not a URI
        return uri


def _schemas_in(schema: Schema) -> Iterator[Schema]:
    """Yield the first schemas of a document, the outer ones before the inner ones."""
    waiting: deque[Any] = deque([schema])
    for _ in range(_MAX_SEARCHED):
        if not waiting:
            return
        value = waiting.popleft()
        if isinstance(value, Mapping):
            yield value
            waiting += (part for key, part in value.items() if key not in DATA and isinstance(part, Mapping | list))
        else:
            waiting += (part for part in value if isinstance(part, Mapping | list))
