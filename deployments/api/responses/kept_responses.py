"""KeptResponses: the responses that this ingress keeps, and those that it finds at the others."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from deployments.api.body import MAX_INLINE_BYTES
from deployments.api.responses.background import BackgroundResponses, encoded
from deployments.api.responses.event_log import event_response
from deployments.api.responses.input_items import InputItem, InputMessage, ItemReference, parse_conversation
from deployments.api.responses.protocol import ResponseRequest
from deployments.api.responses.store import ResponseStore, StoredResponse
from deployments.api.sse import COMMENT_S
from deployments.config import LimitOptions
from deployments.errors import ApiError
from engine.errors import shown

__all__ = ["AskIngresses", "KeptResponses"]

AskIngresses = Callable[[str, Any], Awaitable[Any]]  # (method, its argument) -> the first result that is not None

_ID = re.compile(r"resp_[0-9a-f]{32}")
_MOST_MISSED = 5  # times that no ingress has the events of a stream, a second each, before it ends
_ITEM_ID = re.compile(r"[a-z]+_[0-9a-f]{32}")


class KeptResponses:
    """Keeps responses, and finds, continues, cancels and deletes them, whichever ingress keeps them.

    Args:
        limits: how many are kept, and for how long.
        ask_ingresses: calls a method of all ingresses.

    Attributes:
        store: those of this ingress that have ended.
        background: those of this ingress that are being computed without a client that waits.
    """

    def __init__(self, limits: LimitOptions, ask_ingresses: AskIngresses) -> None:
        self._ttl_s = limits.stored_response_ttl_s
        self._ask_ingresses = ask_ingresses
        self.is_open = limits.max_stored_responses > 0
        self.store = ResponseStore(limits.max_stored_responses, limits.max_stored_response_bytes, self._ttl_s)
        self.background = BackgroundResponses(self.store)

    def keep(self, items: Sequence[InputItem], response: dict[str, Any]) -> None:
        """Keep a response and its whole input."""
        listed = [item.listed() for item in items]
        item_ids = tuple(item["id"] for item in response["output"])
        self.store.put(response["id"], StoredResponse(encoded(response), encoded(listed), item_ids))

    def find(self, response_id: str) -> StoredResponse | None:
        """Return a response of this ingress, without its events; None if it keeps none with this id."""
        stored = self.background.get(response_id) or self.store.get(response_id)
        return None if stored is None else replace(stored, events=())

    def cancel_own(self, response_id: str) -> StoredResponse | None:
        """End a response of this ingress that is being computed, and return it; None if this ingress keeps none."""
        self.background.cancel(response_id)
        return self.find(response_id)

    def delete_own(self, response_id: str) -> bool:
        """Drop a response of this ingress; returns whether it kept one."""
        return self.background.delete(response_id) or self.store.delete(response_id)

    async def get(self, response_id: str) -> StoredResponse:
        """Return a response.

        Raises:
            ApiError: 404 if no ingress keeps it.
        """
        stored = self.find(response_id)
        if stored is None and _ID.fullmatch(response_id):
            stored = await self._ask_ingresses("stored_response", response_id)
        if stored is None:
            raise self._not_found("response", response_id)
        return stored

    async def events_after(self, response_id: str, num_known: int) -> tuple[list[bytes], bool] | None:
        """Return events of a response of this ingress as `EventLog.events_after`; None if it keeps none of them."""
        log = self.background.log_of(response_id)
        if log is not None:
            return await log.events_after(num_known)
        stored = self.store.get(response_id)
        return None if stored is None or not stored.events else (list(stored.events[num_known:]), True)

    async def stream(self, response_id: str, first: int) -> Response:
        """Return the events of a response, from the index ``first`` on, also those that are still to come.

        Raises:
            ApiError: 404 if no ingress keeps it, 400 if its events are not kept.
        """
        if await self._find_events(response_id, 0) is None:
            await self.get(response_id)
            problem = f"the events of response {shown(response_id)} are not kept: it was not created with"
            problem += " background=true and stream=true, or they exceed limits.max_stored_response_bytes"
            raise ApiError(400, f"{problem}; leave out stream to get the whole response", param="stream")
        num_missed = 0

        async def events_after(num_known: int) -> tuple[list[bytes], bool]:
            nonlocal num_missed
            events = await self._find_events(response_id, num_known)
            if events is not None:
                num_missed = 0
                return events
            num_missed += 1  # it was deleted, or its ingress is busy
            await asyncio.sleep(COMMENT_S)
            return [], num_missed == _MOST_MISSED

        return event_response(events_after, first)

    async def _find_events(self, response_id: str, num_known: int) -> tuple[list[bytes], bool] | None:
        events = await self.events_after(response_id, num_known)
        if events is None and _ID.fullmatch(response_id):
            events = await self._ask_ingresses("events_after", (response_id, num_known))
        return events

    async def cancel(self, response_id: str) -> StoredResponse:
        """End a response that is computed in the background, and return it; one that has ended stays as it is.

        Raises:
            ApiError: 404 if no ingress keeps it, 400 if it was not created with ``background``.
        """
        stored = self.cancel_own(response_id)
        if stored is None and _ID.fullmatch(response_id):
            stored = await self._ask_ingresses("cancel_response", response_id)
        if stored is None:
            raise self._not_found("response", response_id)
        if not stored.is_background:
            problem = f"response {shown(response_id)} cannot be cancelled: it was not created with background=true"
            raise ApiError(400, f"{problem}; close its connection instead", param="response_id")
        return stored

    async def delete(self, response_id: str) -> None:
        """Drop a response.

        Raises:
            ApiError: 404 if no ingress keeps it.
        """
        if self.delete_own(response_id):
            return
        if not _ID.fullmatch(response_id) or not await self._ask_ingresses("delete_response", response_id):
            raise self._not_found("response", response_id)

    async def conversation(self, response_id: str | None) -> tuple[list[InputItem], int]:
        """Return the items up to the end of a response, and the length of their JSON; nothing without a response.

        Raises:
            ApiError: 400 about ``previous_response_id`` if no ingress keeps it, or it has no answer.
        """
        if response_id is None:
            return [], 0
        try:
            stored = await self.get(response_id)
        except ApiError as error:
            code = "previous_response_not_found"
            raise ApiError(400, error.message, param="previous_response_id", code=code) from None
        if stored.status not in ("completed", "incomplete"):
            problem = f"response {shown(response_id)} is {stored.status}; give one that is completed"
            raise ApiError(400, problem, param="previous_response_id")
        if stored.num_bytes <= MAX_INLINE_BYTES:
            return _items_of(stored), stored.num_bytes
        return await asyncio.to_thread(_items_of, stored), stored.num_bytes

    async def own_items(self, body: ResponseRequest) -> list[InputItem]:
        """Return the items of a request's input, with those that it refers to.

        Raises:
            ApiError: 404 that names a reference to an item of no response that is kept.
        """
        if isinstance(body.input, str):
            return [InputMessage(role="user", content=body.input)]
        referred = await self._find_items({item.id for item in body.input if isinstance(item, ItemReference)})
        items: list[InputItem] = []
        for index, item in enumerate(body.input):
            if not isinstance(item, ItemReference):
                items.append(item)
            elif item.id in referred:
                items += parse_conversation([referred[item.id]])
            else:
                raise self._not_found("item", item.id, param=f"input[{index}].id")
        return items

    async def _find_items(self, ids: set[str]) -> dict[str, dict[str, Any]]:
        """Return the output items with these ids, as far as an ingress keeps them."""
        items = await asyncio.to_thread(self.store.items, ids) if ids else {}
        wanted = {item_id for item_id in ids - items.keys() if _ITEM_ID.fullmatch(item_id)}
        while wanted and (more := await self._ask_ingresses("stored_items", sorted(wanted))):
            items |= more  # all that one ingress keeps
            wanted -= more.keys()
        return items

    def _not_found(self, kind: str, wrong_id: str, param: str | None = None) -> ApiError:
        where = f"responses are kept in the memory of the ingress that made them, for at most {self._ttl_s:g} s"
        return ApiError(404, f"{kind} {shown(wrong_id)} is not kept; {where}", param=param, code=f"{kind}_not_found")


def _items_of(stored: StoredResponse) -> list[InputItem]:
    return parse_conversation(json.loads(stored.input) + json.loads(stored.response)["output"])
