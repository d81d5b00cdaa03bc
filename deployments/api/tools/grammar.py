"""The form of an answer that must call a tool, as structured outputs.

    tool_choice names a function    the answer is a JSON object of its parameters
    tool_choice is "required"       the answer is a JSON list of {"name": ..., "arguments": {...}}

This form needs no support by the model, and the schemas are enforced whether they are ``strict`` or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments.api.tools.fields import NamedChoice, Tool, ToolChoice
from engine.errors import RequestError
from engine.structured_outputs.params import StructuredOutputsParams

__all__ = ["forced_calls", "parameters_of"]

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
        moved = {name: _moved(_object(schema), f"#/$defs/{_pointer(name)}") for name, schema in schemas.items()}
        return StructuredOutputsParams(json=calls | {"$defs": moved})
    except RequestError as error:
        raise error.renamed("tools") from None


def parameters_of(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's parameters."""
    return _NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters


def _object(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose values are objects, as arguments are."""
    return schema if "type" in schema else {"type": "object"} | schema


def _call(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{_pointer(name)}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """Return a schema that is now at ``root`` of another one, with its references to itself adjusted."""
    if isinstance(schema, dict):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, root)
            for key, value in schema.items()
        }
    return [_moved(one, root) for one in schema] if isinstance(schema, list) else schema


def _pointer(name: str) -> str:
    """Return a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
