"""Vectors as JSON, slice by slice: those of a large request are written while other requests get their turns."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response

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
    parts: list[bytes] = []
    at_once = max(1, FLOATS_AT_ONCE // max(1, len(pooled.results[0]) // FLOAT_BYTES))
    for start in range(0, len(pooled.results), at_once):
        if start:
            await asyncio.sleep(0)
        parts += _items(pooled.results[start : start + at_once], start, kind, key, as_base64=as_base64)
    before = encode_json(dict(head)).encode()[:-1]
    content = b"".join((before, b',"data":[', b",".join(parts), b"]}"))
    return Response(content, media_type="application/json", headers={"X-Pagoda-Replica": pooled.replica})


def _items(results: Sequence[bytes], start: int, kind: str, key: str, *, as_base64: bool) -> list[bytes]:
    def written(result: bytes) -> str | list[float]:
        return base64.b64encode(result).decode() if as_base64 else floats(result)

    return [
        _encode({"index": index, "object": kind, key: written(result)}) for index, result in enumerate(results, start)
    ]
