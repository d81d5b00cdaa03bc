"""What form a request wants its text in: ``structured_outputs``, or the OpenAI API's ``response_format``.

Both become the engine's StructuredOutputsParams; whether a grammar compiles is found out there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.errors import ApiError
from engine.errors import shown
from engine.structured_outputs.params import KINDS, StructuredOutputsParams

__all__ = ["refuse_old_names", "structured_outputs"]


def structured_outputs(
    response_format: Mapping[str, Any] | None, asked: Mapping[str, Any] | None
) -> StructuredOutputsParams | None:
    """Return the form that the text must have, if the request asks for one.

    Raises:
        ApiError: 400 for a form that is incomplete or unknown, or for two of them.
        RequestError: for a value that the engine's types refuse.
    """
    from_format = None if response_format is None else _from_response_format(response_format)
    if asked is None:
        return from_format
    if from_format is not None:
        raise ApiError(
            400, "structured_outputs and response_format are both given; choose one", param="structured_outputs"
        )
    unknown = next((name for name in asked if name not in KINDS), None)
    if unknown is not None:
        raise ApiError(
            400,
            f"structured_outputs has the key {shown(unknown)}; it knows {', '.join(KINDS)}",
            param="structured_outputs",
        )
    return StructuredOutputsParams(**asked)


def _from_response_format(response_format: Mapping[str, Any]) -> StructuredOutputsParams | None:
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise ApiError(
            400,
            f"response_format has the type {shown(kind)}; give text, json_object or json_schema",
            param="response_format",
        )
    described = response_format.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise ApiError(
            400,
            "response_format lacks its schema; give json_schema: {name, schema}, where schema is a JSON schema",
            param="response_format",
        )
    return StructuredOutputsParams(json=described["schema"])


def refuse_old_names(names: Mapping[str, Any]) -> None:
    """Refuse vLLM's former ``guided_*`` parameters, which would be dangerous to ignore.

    Raises:
        ApiError: 400 that says what to send instead.
    """
    for name, value in names.items():
        if name.startswith("guided_") and value is not None:
            form = name.removeprefix("guided_")
            remedy = f'send structured_outputs: {{"{form}": ...}}' if form in KINDS else "leave it out"
            raise ApiError(400, f"{name} is an old name that structured_outputs replaces; {remedy}", param=name)
