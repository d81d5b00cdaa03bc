"""page_of: the part of a list that the query of a request chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.datastructures import QueryParams

from deployments.errors import ApiError
from engine.errors import shown

__all__ = ["page_of"]


def page_of(
    objects: Sequence[dict[str, Any]], query: QueryParams, *, default: int, most: int, order: str = "desc"
) -> dict[str, Any]:
    """Return a page.

    Args:
        objects: the whole list, the oldest first.
        query: ``limit``, ``after`` and ``order``.
        default: of ``limit``.
        most: the largest ``limit``.
        order: without ``order``.

    Raises:
        ApiError: 400 for an invalid parameter.
    """
    limit, order, after = query.get("limit", str(default)), query.get("order", order), query.get("after")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order={shown(order)} is invalid; give asc or desc", param="order")
    if not (limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise ApiError(400, f"limit={shown(limit)} is invalid; give a number from 1 to {most}", param="limit")
    ordered = list(objects) if order == "asc" else list(objects)[::-1]
    if after is not None:
        index = next((index for index, item in enumerate(ordered) if item["id"] == after), None)
        if index is None:
            raise ApiError(400, f"after={shown(after)} is not the id of an object of this list", param="after")
        ordered = ordered[index + 1 :]
    data = ordered[: int(limit)]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": len(ordered) > len(data)}
