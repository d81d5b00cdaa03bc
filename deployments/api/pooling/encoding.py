"""Vectors as JSON, slice by slice: those of a large request are written while other requests get their turns."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.api.json_response import encode_json
from deployments.api.pooling.serving import Pooled

__all__ = ["floats", "vector_response"]

FLOATS_AT_ONCE = 2**14  # about a millisecond
FLOAT_BYTES = 4

_encode = msgspec.json.Encoder().encode


def floats(result: bytes) -> list[float]:
    """Return the numbers of a result."""
    numbers: list[float] = np.frombuffer(result, "<f4").tolist()
    return numbers


async def vector_response(pooled: Pooled, head: Mapping[str, Any], *, kind: str, key: str, as_base64: bool) -> Response:
    """Return the list of all vectors.

    Args:
        pooled: the vectors.
        head: the other fields of the response.
        kind: ``object`` of each item.
        key: the field of an item that holds its vector.
        as_base64: whether that is the base64 of little-endian float32, instead of a list.
    """
    parts = [encode_json(dict(head)).encode()[:-1] + b',"data":[']
    at_once = max(1, FLOATS_AT_ONCE // max(1, len(pooled.results[0]) // FLOAT_BYTES))
    for start in range(0, len(pooled.results), at_once):
        if start:
            parts.append(b",")
            await asyncio.sleep(0)
        parts.append(_items(pooled.results[start : start + at_once], start, kind, key, as_base64=as_base64))
    return _PartsResponse([*parts, b"]}"], {"X-Pagoda-Replica": pooled.replica})


def _items(results: Sequence[bytes], start: int, kind: str, key: str, *, as_base64: bool) -> bytes:
    def written(result: bytes) -> str | list[float]:
        return base64.b64encode(result).decode() if as_base64 else floats(result)

    return b",".join(
        _encode({"index": index, "object": kind, key: written(result)}) for index, result in enumerate(results, start)
    )


class _PartsResponse(Response):
    """A JSON response that is sent part by part: tens of megabytes in one piece would hold up other requests.

    Args:
        parts: of the body.
        headers: further ones.
    """

    def __init__(self, parts: Sequence[bytes], headers: Mapping[str, str]) -> None:
        length = {"content-length": str(sum(map(len, parts)))}
        super().__init__(headers={**headers, **length}, media_type="application/json")
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
