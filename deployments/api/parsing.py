"""Parses a request's bytes to its typed body, and turns a validation error to one line that names the parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from deployments.errors import ApiError
from engine.errors import shown

__all__ = ["parse_body"]


class Body(Protocol):
    """A pydantic model that can check combinations of its fields."""

    def check(self) -> None:
        """Raise RequestError, or ApiError, for an invalid combination."""


BodyType = TypeVar("BodyType", bound=Body)


def parse_body(kind: type[BodyType], body: bytes) -> BodyType:
    """Return the request in ``body``.

    Raises:
        ApiError: 400 that names the parameter and its value; 501 for a parameter that is not offered.
        RequestError: for an invalid combination of fields.
    """
    assert issubclass(kind, BaseModel)
    try:
        fields = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(fields).__name__}", code="invalid_json")
    try:
        request: BodyType = kind.model_validate(fields)
    except ValidationError as error:
        raise _as_api_error(error, fields) from None
    request.check()
    return request


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _as_api_error(error: ValidationError, fields: Mapping[str, Any]) -> ApiError:
    """Return one line for the first wrong field."""
    errors = error.errors(include_url=False)
    if not errors[0]["loc"]:  # the error is in a key
        return ApiError(400, f"the body is refused: {errors[0]['msg'].lower()}", code="invalid_json")
    name = str(errors[0]["loc"][0])
    if errors[0]["type"] == "missing" and len(errors[0]["loc"]) == 1:
        return ApiError(400, f"{name} is missing; give it", param=name)
    # The branch of a union that got deepest describes the error best.
    first = max((item for item in errors if item["loc"][0] == name), key=lambda item: len(item["loc"]))
    where = name + "".join(f"[{part}]" for part in first["loc"][1:] if isinstance(part, int))
    value = first["input"] if first["type"] != "missing" else fields[name]
    return ApiError(400, f"{where}={shown(value)} is refused: {first['msg'][0].lower()}{first['msg'][1:]}", param=name)
