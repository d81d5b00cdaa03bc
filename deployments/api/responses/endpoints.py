"""Responses: the endpoints of /v1/responses, and the responses that this ingress and the others keep."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.body import MAX_INLINE_BYTES, read_body
from deployments.api.json_response import JsonResponse, encode_json
from deployments.api.responses.input_items import InputItem, InputMessage, parse_conversation, require_calls
from deployments.api.responses.protocol import ResponseRequest
from deployments.api.responses.store import ResponseStore, StoredResponse
from deployments.api.responses.translation import chat_request, renamed
from deployments.api.responses.truncation import last_turns
from deployments.api.responses.writers import ResponseWriters
from deployments.api.serving import Serving
from deployments.config import LimitOptions
from deployments.errors import ApiError
from engine.errors import PromptTooLongError, RequestError, shown

__all__ = ["Responses"]

AskIngresses = Callable[[str, str], Awaitable[Any]]  # (method, response id) -> the first result that is not None

_ID = re.compile(r"resp_[0-9a-f]{32}")
_DEFAULT_PAGE, _MAX_PAGE = 20, 100  # items


class Responses:
    """Creates responses, keeps them, and finds those that other ingresses keep.

    Args:
        serving: answers chat requests.
        limits: how many responses are kept, and for how long.
        ask_ingresses: calls a method of all ingresses.
    """

    def __init__(self, serving: Serving, limits: LimitOptions, ask_ingresses: AskIngresses) -> None:
        self._serving = serving
        self._limits = limits
        self._ask_ingresses = ask_ingresses
        self.store = ResponseStore(
            limits.max_stored_responses, limits.max_stored_response_bytes, limits.stored_response_ttl_s
        )

    async def create(self, request: Request) -> Response:
        """Answer an input, whole or as a stream."""
        body, items, num_bytes = await self._read(request)
        try:
            return await self._answer(body, items, num_bytes)
        except PromptTooLongError:
            if body.truncation != "auto":
                raise
            fits = partial(self._fits, body, num_bytes=num_bytes)
            rest = await last_turns(items, fits)
            if rest is None:
                raise
            return await self._answer(body, rest, num_bytes)

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens of an input."""
        body, items, num_bytes = await self._read(request)
        number = await self._count(body, items, num_bytes)
        return JsonResponse({"object": "response.input_tokens", "input_tokens": number})

    async def retrieve(self, response_id: str, request: Request) -> Response:
        """Return a response that is kept."""
        if request.query_params.get("stream", "").lower() == "true":
            raise ApiError(501, "stream=true is not offered; leave it out to get the whole response", param="stream")
        return Response((await self._require(response_id)).response, media_type=JsonResponse.media_type)

    async def delete(self, response_id: str) -> Response:
        """Drop a response that is kept."""
        if not self.store.delete(response_id):
            known = _ID.fullmatch(response_id) is not None
            if not known or not await self._ask_ingresses("delete_response", response_id):
                raise self._not_found(response_id)
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, response_id: str, request: Request) -> Response:
        """List the input of a response that is kept, that of earlier responses included; the latest item first."""
        items: list[dict[str, Any]] = json.loads((await self._require(response_id)).input)
        return JsonResponse(_page(items, request.query_params))

    async def _read(self, request: Request) -> tuple[ResponseRequest, Sequence[InputItem], int]:
        """Return a body, the items of the whole input, and the length of their JSON."""
        body = await read_body(ResponseRequest, request, self._limits.max_body_bytes)
        earlier, num_bytes = await self._conversation(body.previous_response_id)
        items = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
        require_calls(items, earlier)
        return body, [*earlier, *items], body.num_bytes + num_bytes

    async def _answer(self, body: ResponseRequest, items: Sequence[InputItem], num_bytes: int) -> Response:
        keep = partial(self._keep, items) if body.is_stored and self._limits.max_stored_responses else None
        try:
            chat = chat_request(body, items, num_bytes)
            return await self._serving.chat(chat, partial(ResponseWriters, request=body, keep=keep))
        except RequestError as error:
            raise renamed(error) from None

    async def _count(self, body: ResponseRequest, items: Sequence[InputItem], num_bytes: int) -> int:
        try:
            return await self._serving.count_tokens(chat_request(body, items, num_bytes))
        except RequestError as error:
            raise renamed(error) from None

    async def _fits(self, body: ResponseRequest, items: Sequence[InputItem], *, num_bytes: int) -> bool:
        try:
            await self._count(body, items, num_bytes)
        except PromptTooLongError:
            return False
        return True

    async def _conversation(self, response_id: str | None) -> tuple[list[InputItem], int]:
        """Return the items up to the end of a response, and the length of their JSON."""
        if response_id is None:
            return [], 0
        stored = await self._find(response_id)
        if stored is None:
            error = self._not_found(response_id)
            raise ApiError(400, error.message, param="previous_response_id", code="previous_response_not_found")
        if stored.num_bytes <= MAX_INLINE_BYTES:
            return _items_of(stored), stored.num_bytes
        return await asyncio.to_thread(_items_of, stored), stored.num_bytes

    async def _require(self, response_id: str) -> StoredResponse:
        stored = await self._find(response_id)
        if stored is None:
            raise self._not_found(response_id)
        return stored

    async def _find(self, response_id: str) -> StoredResponse | None:
        stored = self.store.get(response_id)
        if stored is None and _ID.fullmatch(response_id):
            stored = await self._ask_ingresses("stored_response", response_id)
        return stored

    def _keep(self, items: Sequence[InputItem], response: dict[str, Any]) -> None:
        listed = [item.listed() for item in items]
        self.store.put(response["id"], StoredResponse(_encoded(response), _encoded(listed)))

    def _not_found(self, response_id: str) -> ApiError:
        seconds = self._limits.stored_response_ttl_s
        where = f"responses are kept in the memory of the ingress that made them, for at most {seconds:g} s"
        return ApiError(404, f"response {shown(response_id)} is not kept; {where}", code="response_not_found")


def _items_of(stored: StoredResponse) -> list[InputItem]:
    return parse_conversation(json.loads(stored.input) + json.loads(stored.response)["output"])


def _encoded(value: Any) -> bytes:
    return encode_json(value).encode(errors="backslashreplace")  # half a character becomes an escape of JSON


def _page(items: list[dict[str, Any]], query: QueryParams) -> dict[str, Any]:
    """Return the items that ``order``, ``after`` and ``limit`` of a query choose."""
    limit, order, after = query.get("limit", str(_DEFAULT_PAGE)), query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order={shown(order)} is invalid; give asc or desc", param="order")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MAX_PAGE:
        raise ApiError(400, f"limit={shown(limit)} is invalid; give a number from 1 to {_MAX_PAGE}", param="limit")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        index = next((index for index, item in enumerate(ordered) if item["id"] == after), None)
        if index is None:
            raise ApiError(400, f"after={shown(after)} is the id of no item; give one of a page", param="after")
        ordered = ordered[index + 1 :]
    data = ordered[: int(limit)]
    ends = {"first_id": data[0]["id"] if data else "", "last_id": data[-1]["id"] if data else ""}
    return {"object": "list", "data": data, **ends, "has_more": len(ordered) > len(data)}
