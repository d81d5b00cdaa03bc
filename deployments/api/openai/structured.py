"""Structured outputs of a request: ``structured_outputs``, or the OpenAI API's ``response_format``.

Both become the engine's StructuredOutputsParams. The engine compiles the grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import RequestError, listed, shown
from engine.options.structured_outputs import KINDS, StructuredOutputsParams

__all__ = ["reject_old_names", "structured_outputs"]


def structured_outputs(
    response_format: Mapping[str, Any] | None, requested: Mapping[str, Any] | None
) -> StructuredOutputsParams | None:
    """Return the structured outputs of a request, or None.

    Raises:
        RequestError: for an incomplete or unknown format, or if both fields are given.
    """
    from_format = None if response_format is None else _from_response_format(response_format)
    if requested is None:
        return from_format
    if from_format is not None:
        raise RequestError(
            "and response_format are both given", param="structured_outputs", remedy="choose one of them"
        )
    if unknown := [name for name in requested if name not in KINDS]:
        problem, remedy = f"has the unknown key {listed(unknown)}", f"give one of {', '.join(KINDS)}"
        raise RequestError(problem, param="structured_outputs", remedy=remedy)
    return StructuredOutputsParams(**requested)


def _from_response_format(response_format: Mapping[str, Any]) -> StructuredOutputsParams | None:
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        problem = f"has the type {shown(kind)}"
        raise RequestError(problem, param="response_format", remedy="give text, json_object or json_schema")
    described = response_format.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        remedy = "give json_schema: {name, schema}, where schema is a JSON schema"
        raise RequestError("lacks its schema", param="response_format", remedy=remedy)
    return StructuredOutputsParams(json=described["schema"])


def reject_old_names(names: Mapping[str, Any]) -> None:
    """Reject vLLM's former ``guided_*`` parameters, which would be dangerous to ignore.

    Raises:
        RequestError: the remedy is the parameter to send instead.
    """
    for name, value in names.items():
        if name.startswith("guided_") and value is not None:
            kind = name.removeprefix("guided_")
            remedy = f'send structured_outputs: {{"{kind}": ...}}' if kind in KINDS else "leave it out"
            raise RequestError("is an old name that structured_outputs replaces", param=name, remedy=remedy)
