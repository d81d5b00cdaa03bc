"""What is done to JSON schemas before llguidance compiles them; their data, such as enums, is never changed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

__all__ = [
    "BY_NAME",
    "DATA",
    "map_schemas",
    "referenced",
    "without_unknown_formats",
    "without_unknown_formats_in_grammar",
]

DATA = frozenset(("const", "default", "enum", "example", "examples"))  # keywords whose values are not schemas
# Keywords whose values are schemas by name.
BY_NAME = frozenset(["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"])
# The formats that llguidance knows; it has no list of them to ask for, and to try each name takes too long.
_FORMATS = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"]
)
_JSON = re.compile(r"%json\s*(?=\{)")


def map_schemas(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Any:
    """Return a copy of a schema in which ``change`` has replaced each schema, the whole before its parts.

    References may point into keywords of any name, so whatever is not known to be data is taken for a schema, and so is
    data that a reference points to: ``default`` may be the name of a schema.

    Args:
        schema: of any form; a value that is not an object stays as it is.
        change: returns what stands for a schema, whose parts are then changed; None leaves it and its parts alone.
    """
    return _mapped(schema, change, referenced(schema))


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any] | None], pointed: set[int]) -> Any:
    if isinstance(schema, list):
        return [_mapped(part, change, pointed) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed = change(dict(schema))
    if changed is None:
        return schema
    for key, value in changed.items():
        if key in BY_NAME and isinstance(value, Mapping):
            changed[key] = {name: _mapped(part, change, pointed) for name, part in value.items()}
        elif key not in DATA or id(value) in pointed:
            changed[key] = _mapped(value, change, pointed)
    return changed


def referenced(document: Any) -> set[int]:
    """Return the ids of the objects to which the document's references by JSON pointer lead, and of those on the way.

    A pointer starts from the nearest schema around it that has an ``$id``, or from the document.
    """
    objects, pointers = [(document, document)], dict[tuple[int, str], Any]()  # each object with what is around it
    for part, around in objects:  # which grows meanwhile
        base = part if isinstance(part, Mapping) and "$id" in part else around
        reference = part.get("$ref") if isinstance(part, Mapping) else None
        if isinstance(reference, str) and reference.startswith("#/"):
            pointers[id(base), reference] = base
        values = part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()
        objects.extend((value, base) for value in values if isinstance(value, Mapping | list))
    ids = set[int]()
    for (_, pointer), at in pointers.items():
        for name in unquote(pointer).split("/")[1:]:
            at = at.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None
            ids.add(id(at))
    return ids - {id(None)}


def without_unknown_formats(schema: Any) -> Any:
    """Return a schema without the values of ``format`` that llguidance does not know.

    They are annotations (JSON Schema 2020-12, validation, 7.2.1), which limit nothing. llguidance refuses them, and to
    let it pass over them would let it pass over other keywords, too.
    """
    return map_schemas(schema, _without_unknown_format)


def without_unknown_formats_in_grammar(grammar: str) -> str:
    """Do the same to the schemas after ``%json`` in a grammar in Lark's notation."""
    pieces, end = [], 0
    for start in _JSON.finditer(grammar):
        if start.start() < end:
            continue  # within the schema before
        with suppress(ValueError, RecursionError):  # llguidance says what is wrong
            schema, stop = json.JSONDecoder().raw_decode(grammar, start.end())
            if (changed := without_unknown_formats(schema)) != schema:
                pieces += [grammar[end : start.end()], json.dumps(changed)]
                end = stop
    return "".join([*pieces, grammar[end:]])


def _without_unknown_format(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("format")
    if isinstance(name, str) and name not in _FORMATS:
        del schema["format"]
    return schema
