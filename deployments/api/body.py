"""A request's body: read up to a size limit, parsed into its type; an error is one line that names the parameter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError
from starlette.requests import Request

from deployments.api.turns import REQUESTS_PER_TURN, Turns
from deployments.errors import ApiError
from deployments.large_json import decode_json
from deployments.proxy.client_rules import CLIENT_HEADER
from engine.errors import shown

__all__ = ["MAX_INLINE_BYTES", "BodyReader", "JsonBody", "json_path", "parse_body"]

MAX_INLINE_BYTES = 2**16  # a longer body would delay every stream of this process
BYTES_PER_S = 8192  # a slower client holds its connection for nothing


class Body(Protocol):
    """A pydantic model that can check combinations of its fields."""

    def check(self) -> None:
        """Raise RequestError, or ApiError, for an invalid combination."""

    def set_num_bytes(self, num_bytes: int) -> None:
        """Set the length of the JSON."""


BodyType = TypeVar("BodyType", bound=Body)


class JsonBody(BaseModel):
    """A body that knows its length. Unknown fields are kept and ignored."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=())
    _num_bytes: int = PrivateAttr(default=0)

    def check(self) -> None:
        """Raise RequestError for an invalid combination of fields; there is none here."""

    @property
    def num_bytes(self) -> int:
        """Length of the JSON, which bounds the time that the request takes to prepare."""
        return self._num_bytes

    def set_num_bytes(self, num_bytes: int) -> None:
        """Set the length of the JSON."""
        self._num_bytes = num_bytes


class BodyReader:
    """Reads the bodies of requests.

    Complete bodies are released a few per event-loop iteration, round-robin over clients: their requests may have
    started long before.

    Args:
        max_bytes: a longer body is rejected.
        timeout_s: for the whole body, and a second more for each BYTES_PER_S of it that have come.
    """

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._turns = Turns(REQUESTS_PER_TURN)

    async def read(self, kind: type[BodyType], request: Request) -> BodyType:
        """Return the request in a JSON body; a long one is parsed in a thread.

        Raises:
            ApiError: 413 for a longer body, before it is read to its end, 408 for a slow one, 400 for another content
                type, 415 for a compressed body, and what ``parse_body`` raises.
            RequestError: for an invalid combination of fields.
        """
        body = await self._read(request)
        return await _parsed(lambda: parse_body(kind, body), len(body))

    async def read_by_field(self, kinds: Mapping[str, type[BodyType]], request: Request) -> BodyType:
        """Return the request in a body, whose type is that of the first key of ``kinds`` that the body has.

        Raises:
            ApiError: as ``read``, and 400 for a body with none of the keys.
            RequestError: for an invalid combination of fields.
        """
        body = await self._read(request)

        def parse() -> BodyType:
            fields = _decode(body)
            kind = next((kind for name, kind in kinds.items() if fields.get(name) is not None), None)
            if kind is None:
                names = " or ".join(kinds)
                raise ApiError(400, f"{names} is missing; give one of them", param=next(iter(kinds)))
            return _validated(kind, fields, len(body))

        return await _parsed(parse, len(body))

    async def _read(self, request: Request) -> bytearray:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(400, f"content-type '{content_type[:80]}' is not supported; send application/json")
        encoding = request.headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            problem = f"content-encoding '{encoding[:80]}' is not supported; send the JSON as it is"
            raise ApiError(415, problem)
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise self._too_large()
        body = bytearray()
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._timeout_s) as timeout:
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self._max_bytes:
                        raise self._too_large()
                    timeout.reschedule(started + self._timeout_s + len(body) / BYTES_PER_S)
        except TimeoutError:
            problem = f"only {len(body)} bytes of the body came in {self._timeout_s:g} s; send it without pauses"
            raise ApiError(408, problem, code="timeout") from None
        await self._turns.wait(request.headers.get(CLIENT_HEADER, ""))
        return body

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body exceeds {self._max_bytes} bytes; send less, or raise limits.max_body_bytes")


async def _parsed(parse: Callable[[], BodyType], num_bytes: int) -> BodyType:
    return parse() if num_bytes <= MAX_INLINE_BYTES else await asyncio.to_thread(parse)


def parse_body(kind: type[BodyType], body: bytes | bytearray) -> BodyType:
    """Return the request in ``body``.

    Raises:
        ApiError: 400 that names the parameter and its value; 501 for a parameter that is not offered.
        RequestError: for an invalid combination of fields.
    """
    return _validated(kind, _decode(body), len(body))


def _decode(body: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in ``body``."""
    try:
        fields = decode_json(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(fields).__name__}", code="invalid_json")
    return fields


def _validated(kind: type[BodyType], fields: dict[str, Any], num_bytes: int) -> BodyType:
    assert issubclass(kind, BaseModel)
    try:
        request: BodyType = kind.model_validate(fields)
    except ValidationError as error:
        raise _as_api_error(error, fields) from None
    request.check()
    request.set_num_bytes(num_bytes)
    return request


def _as_api_error(error: ValidationError, fields: Mapping[str, Any]) -> ApiError:
    """Return one line for the first wrong field."""
    errors = error.errors(include_url=False)
    if not errors[0]["loc"]:  # the error is in a key
        return ApiError(400, f"the body is invalid: {errors[0]['msg'].lower()}", code="invalid_json")
    name = str(errors[0]["loc"][0])
    # The branch of a union that got deepest describes the error best.
    first = max((item for item in errors if item["loc"][0] == name), key=lambda item: len(item["loc"]))
    if first["type"] == "missing":
        *outer, missing = first["loc"]
        inside = json_path(outer, fields)
        return ApiError(400, f"{inside}.{missing} is missing; give it".lstrip("."), param=name)
    problem = f"{first['msg'][0].lower()}{first['msg'][1:]}"
    return ApiError(400, f"{json_path(first['loc'], fields)}={shown(first['input'])} is invalid: {problem}", param=name)


def json_path(location: Sequence[int | str], fields: object) -> str:
    """Return the part of pydantic's ``location`` that exists in ``fields``, such as ``messages[0].content``.

    Pydantic names branches of unions in it, too.
    """
    path, value = "", fields
    for part in location:
        if isinstance(part, int) and isinstance(value, list) and part < len(value):
            path += f"[{part}]"
            value = value[part]
        elif isinstance(part, str) and isinstance(value, dict) and part in value:
            path += f".{part}" if path else part
            value = value[part]
    return path
