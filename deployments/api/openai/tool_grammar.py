"""The form of an answer with tool calls, as structured outputs.

    tool_choice names a function    the answer is a JSON object of its parameters
    tool_choice is "required"       the answer is a JSON list of {"name": ..., "arguments": {...}}
    "auto", with a strict tool      the answer is any text; a call in it has the model's own format

The first two need no support by the model, and enforce schemas whether they are ``strict`` or not. The last exists for
models that write calls as Hermes does, if the marker of a call is not a special token; for others ``strict`` changes
nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from deployments.api.openai.moved_schemas import moved_schemas, pointer
from deployments.api.openai.tools import NamedChoice, Tool, ToolChoice
from engine.errors import RequestError
from engine.options.structured_outputs import StructuredOutputsParams

__all__ = ["forced_calls", "parameters_of", "strict_calls"]

_WHITESPACE = {"whitespace_pattern": r"\x20|\x0A\x20{0,16}", "item_separator": ",", "key_separator": ":"}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def forced_calls(
    tools: Sequence[Tool], choice: ToolChoice | None, *, parallel: bool = True
) -> StructuredOutputsParams | None:
    """Return the form that ``choice`` forces on an answer; None if it forces none.

    Raises:
        RequestError: about ``tools``, if a schema is too large or has no valid form.
    """
    if choice in (None, "none", "auto"):
        return None
    schemas = {tool.function.name: parameters_of(tool) for tool in tools}
    try:
        if isinstance(choice, NamedChoice):
            return StructuredOutputsParams(json=_object(schemas[choice.function.name]))
        calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": list(map(_call, schemas))}}
        if not parallel:
            calls["maxItems"] = 1
        objects = {name: _object(schema) for name, schema in schemas.items()}
        return StructuredOutputsParams(json=calls | {"$defs": moved_schemas(objects, "#/$defs")})
    except RequestError as error:
        raise error.renamed("tools") from None


def strict_calls(tools: Sequence[Tool], markers: tuple[str, str]) -> str | None:
    """Return the grammar of text with JSON calls between two markers; None if no tool is strict.

    Calls of the tools that are not strict may have any arguments. Whitespace in JSON is limited, since a small model
    may generate nothing else.
    """
    if not any(tool.function.strict for tool in tools):
        return None
    marker, last = re.escape(markers[0]), markers[1]
    calls = []
    for tool in tools:
        schema = _object(parameters_of(tool)) if tool.function.strict else {"type": "object"}
        start = _literal(f'{{"name": {json.dumps(tool.function.name, ensure_ascii=False)}, "arguments": ')
        calls.append(f"{start} %json {json.dumps(schema | {'x-guidance': _WHITESPACE})}")
    return (
        "%llguidance {}\n"
        "start: (text call)* REST\n"
        f"text[lazy]: /(?s:.*){marker}/\n"
        f"REST: /(?s:.*)/ & ~/(?s:.*{marker}.*)/\n"
        f"call: {_literal(chr(10))} ({' | '.join(calls)}) {_literal('}' + chr(10) + last)}\n"
    )


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def parameters_of(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's parameters."""
    return _NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters


def _object(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose values are objects, as arguments are."""
    return schema if "type" in schema else {"type": "object"} | schema


def _call(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs{pointer(name)}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
