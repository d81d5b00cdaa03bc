"""Errors of request bodies that name the wrong field by its JSON path, such as ``input[2].content``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from deployments.api.body import json_path
from deployments.errors import ApiError
from engine.errors import shown

__all__ = ["MediaError", "NotOfferedError", "invalid_field"]


class NotOfferedError(ValueError):
    """Raised by a validator for what OpenAI offers and Pagoda does not; the client gets 501."""

    status = 501

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what} is not offered; {remedy}")


class MediaError(NotOfferedError):
    """Raised by a validator for images and sound; the client gets 400."""

    status = 400

    def __init__(self, problem: str) -> None:
        ValueError.__init__(self, problem)


def invalid_field(error: ValidationError, fields: Any) -> ApiError:
    """Return one line for the first wrong field of ``fields``: 400, or 501 for what is known but not offered."""
    errors = error.errors(include_url=False)
    if not errors[0]["loc"]:  # the error is in a key
        return ApiError(400, f"the body is invalid: {errors[0]['msg'].lower()}", code="invalid_json")
    name = errors[0]["loc"][:1]
    # The branch of a union that knows the value, or got deepest, describes the error best.
    of_field = (item for item in errors if item["loc"][:1] == name)
    first = max(of_field, key=lambda item: (_is_not_offered(item), len(item["loc"])))
    path = json_path(first["loc"], fields)
    if first["type"] == "missing":
        path = f"{path}.{first['loc'][-1]}" if path else str(first["loc"][-1])
        return ApiError(400, f"{path} is missing; give it", param=path)
    if _is_not_offered(first):
        problem = first["ctx"]["error"]
        return ApiError(problem.status, f"{path}: {problem}", param=path)
    message = first["msg"].removeprefix("Value error, ")
    invalid = f"{path}={shown(first['input'])} is invalid: {message[0].lower()}{message[1:]}"
    return ApiError(400, invalid, param=path)


def _is_not_offered(error: Mapping[str, Any]) -> bool:
    return isinstance(error.get("ctx", {}).get("error"), NotOfferedError)
