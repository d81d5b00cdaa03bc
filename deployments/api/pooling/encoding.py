"""Lists as JSON, part by part: those of a large request are written while other requests get their turns."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.api.json_response import encode_json
from deployments.api.pooling.serving import Pooled

__all__ = ["PART_BYTES", "floats", "list_response", "vectors"]

PART_BYTES = 2**18  # of JSON: at most about a millisecond, for 16,384 numbers of a vector

_encode = msgspec.json.Encoder().encode


def floats(result: bytes) -> list[float]:
    """Return the numbers of a result."""
    numbers: list[float] = np.frombuffer(result, "<f4").tolist()
    return numbers


def vectors(pooled: Pooled, *, kind: str, key: str, as_base64: bool) -> Iterator[dict[str, Any]]:
    """Yield the items of a list of vectors.

    Args:
        pooled: the vectors.
        kind: ``object`` of each item.
        key: the field of an item that holds its vector.
        as_base64: whether that is the base64 of little-endian float32, instead of a list.
    """
    for index, result in enumerate(pooled.results):
        yield {
            "index": index,
            "object": kind,
            key: base64.b64encode(result).decode() if as_base64 else floats(result),
        }


async def list_response(
    pooled: Pooled, head: Mapping[str, Any], items: Iterable[Mapping[str, Any]], name: str = "data"
) -> Response:
    """Return a response with a list of finite numbers and valid texts.

    Args:
        pooled: names the replica.
        head: the other fields of the response.
        items: of the list; each is made when it is written.
        name: the field that holds the list.
    """
    part = bytearray(encode_json(dict(head)).encode()[:-1] + b',"%s":[' % name.encode())
    parts = [part]
    for number, item in enumerate(items):
        if len(part) >= PART_BYTES:
            parts.append(part := bytearray())
            await asyncio.sleep(0)
        if number:
            part += b","
        part += _encode(item)
    part += b"]}"
    return _PartsResponse(parts, {"X-Pagoda-Replica": pooled.replica})


class _PartsResponse(Response):
    """A JSON response that is sent part by part: tens of megabytes in one piece would hold up other requests.

    Args:
        parts: of the body.
        headers: further ones.
    """

    def __init__(self, parts: Sequence[bytes | bytearray], headers: Mapping[str, str]) -> None:
        length = {"content-length": str(sum(map(len, parts)))}
        super().__init__(headers={**headers, **length}, media_type="application/json")
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": bytes(part), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
