"""Responses: the endpoints of /v1/responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.body import MAX_INLINE_BYTES, BodyReader
from deployments.api.json_response import JsonResponse
from deployments.api.openai.protocol import ChatRequest
from deployments.api.responses.input_items import InputItem, require_calls
from deployments.api.responses.kept_responses import AskIngresses, KeptResponses
from deployments.api.responses.openapi import CANCEL, COUNT_INPUT_TOKENS, CREATE, DELETE, INPUT_ITEMS, RETRIEVE
from deployments.api.responses.protocol import ResponseRequest
from deployments.api.responses.translation import chat_request, renamed
from deployments.api.responses.truncation import last_turns
from deployments.api.responses.writers import Keep, ResponseWriters
from deployments.api.routes import ApiRoute
from deployments.api.serving import Serving
from deployments.config import LimitOptions
from deployments.errors import ApiError
from engine.errors import PromptTooLongError, RequestError, shown

__all__ = ["Responses"]

_DEFAULT_PAGE, _MAX_PAGE = 20, 100  # items


class Responses:
    """Creates responses, and returns, lists, cancels and deletes those that are kept.

    Args:
        serving: answers chat requests.
        bodies: reads those of requests.
        limits: how many responses are kept, and for how long.
        ask_ingresses: calls a method of all ingresses.

    Attributes:
        kept: the responses that this ingress keeps.
    """

    def __init__(self, serving: Serving, bodies: BodyReader, limits: LimitOptions, ask_ingresses: AskIngresses) -> None:
        self._serving = serving
        self._bodies = bodies
        self.kept = KeptResponses(limits, ask_ingresses)

    def routes(self) -> list[ApiRoute]:
        """Return the endpoints."""
        return [
            ApiRoute("/v1/responses", "POST", self.create, CREATE),
            ApiRoute("/v1/responses/input_tokens", "POST", self.count_tokens, COUNT_INPUT_TOKENS),
            ApiRoute("/v1/responses/{response_id}", "GET", self.retrieve, RETRIEVE),
            ApiRoute("/v1/responses/{response_id}", "DELETE", self.delete, DELETE),
            ApiRoute("/v1/responses/{response_id}/cancel", "POST", self.cancel, CANCEL),
            ApiRoute("/v1/responses/{response_id}/input_items", "GET", self.input_items, INPUT_ITEMS),
        ]

    async def create(self, request: Request) -> Response:
        """Answer an input, whole, as a stream, or in the background."""
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
        try:
            builder = await self._serving.builder_for(body.model)
            token_ids = await builder.chat_token_ids(await _chat(body, items, num_bytes))
        except RequestError as error:
            raise renamed(error) from None
        return JsonResponse({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    async def retrieve(self, response_id: str, request: Request) -> Response:
        """Return a response that is kept, or the events of one that is streamed in the background."""
        if request.query_params.get("stream", "").lower() == "true":
            return await self.kept.stream(response_id, _first_event_index(request.query_params))
        return Response((await self.kept.get(response_id)).response, media_type=JsonResponse.media_type)

    async def cancel(self, response_id: str) -> Response:
        """End a response that is computed in the background."""
        return Response((await self.kept.cancel(response_id)).response, media_type=JsonResponse.media_type)

    async def delete(self, response_id: str) -> Response:
        """Drop a response that is kept."""
        await self.kept.delete(response_id)
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, response_id: str, request: Request) -> Response:
        """List the input of a response that is kept, that of earlier responses included; the latest item first."""
        stored = await self.kept.get(response_id)

        def respond() -> Response:
            return JsonResponse(_page(json.loads(stored.input), request.query_params))

        return respond() if len(stored.input) <= MAX_INLINE_BYTES else await asyncio.to_thread(respond)

    async def _read(self, request: Request) -> tuple[ResponseRequest, Sequence[InputItem], int]:
        """Return a body, the items of the whole input, and the length of their JSON."""
        body = await self._bodies.read(ResponseRequest, request)
        earlier, num_bytes = await self.kept.conversation(body.previous_response_id)
        items = await self.kept.own_items(body)
        require_calls(items, earlier)
        return body, [*earlier, *items], body.num_bytes + num_bytes

    async def _answer(self, body: ResponseRequest, items: Sequence[InputItem], num_bytes: int) -> Response:
        keep: Keep | None = partial(self.kept.keep, items) if body.is_stored and self.kept.is_open else None
        background = None
        if body.background:
            if keep is None:
                remedy = "leave it out; the operator can raise limits.max_stored_responses"
                raise RequestError("needs a server that keeps responses", param="background", value=True, remedy=remedy)
            keep, background = self.kept.background.complete, partial(self.kept.background.start, body, items)
        try:
            chat = await _chat(body, items, num_bytes)
            return await self._serving.chat(chat, partial(ResponseWriters, request=body, keep=keep), background)
        except RequestError as error:
            raise renamed(error) from None

    async def _fits(self, body: ResponseRequest, items: Sequence[InputItem], *, num_bytes: int) -> bool:
        try:
            await self._serving.count_tokens(await _chat(body, items, num_bytes))
        except PromptTooLongError:
            return False
        except RequestError as error:
            raise renamed(error) from None
        return True


async def _chat(body: ResponseRequest, items: Sequence[InputItem], num_bytes: int) -> ChatRequest:
    if num_bytes <= MAX_INLINE_BYTES:
        return chat_request(body, items, num_bytes)
    return await asyncio.to_thread(chat_request, body, items, num_bytes)


def _first_event_index(query: QueryParams) -> int:
    """Return the index of the first event after the one that ``starting_after`` of a query names."""
    after = query.get("starting_after")
    if after is None:
        return 0
    if not (after.isdecimal() and len(after) < 10):
        problem = f"starting_after={shown(after)} is invalid; give the sequence number of an event"
        raise ApiError(400, problem, param="starting_after")
    return int(after) + 1


def _page(items: list[dict[str, Any]], query: QueryParams) -> dict[str, Any]:
    """Return the items that ``order``, ``after`` and ``limit`` of a query choose."""
    limit, order, after = query.get("limit", str(_DEFAULT_PAGE)), query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order={shown(order)} is invalid; give asc or desc", param="order")
    if not (limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= _MAX_PAGE):
        raise ApiError(400, f"limit={shown(limit)} is invalid; give a number from 1 to {_MAX_PAGE}", param="limit")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        index = next((index for index, item in enumerate(ordered) if item["id"] == after), None)
        if index is None:
            raise ApiError(400, f"after={shown(after)} is not the id of an item; give one of a page", param="after")
        ordered = ordered[index + 1 :]
    data = ordered[: int(limit)]
    ends = {"first_id": data[0]["id"] if data else "", "last_id": data[-1]["id"] if data else ""}
    return {"object": "list", "data": data, **ends, "has_more": len(ordered) > len(data)}
