"""EventLog: the events of a response that is streamed in the background, for any client that follows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from starlette.responses import Response, StreamingResponse

from deployments.api.json_response import encode_json
from deployments.api.sse import COMMENT, COMMENT_S, HEADERS, EventStream

__all__ = ["EventLog", "EventsAfter", "encode_events", "event_response"]

_END = b"\n\n"  # of an event

EventsAfter = Callable[[int], Awaitable[tuple[list[bytes], bool]]]  # as `EventLog.events_after`


def encode_events(events: Iterable[dict[str, Any]], first: int) -> bytes:
    """Return server-sent events, numbered from ``first`` on. An unpaired surrogate becomes an escape of JSON."""
    texts = (
        f"event: {event['type']}\ndata: {encode_json(event | {'sequence_number': number})}\n\n"
        for number, event in enumerate(events, first)
    )
    return "".join(texts).encode(errors="backslashreplace")


def event_response(events_after: EventsAfter, first: int = 0) -> Response:
    """Return the response that sends the events from the index ``first`` on, and comments while there are none."""

    async def send() -> AsyncIterator[bytes]:
        num_known, has_ended = first, False
        while not has_ended:
            events, has_ended = await events_after(num_known)
            num_known += len(events)
            if events or not has_ended:
                yield b"".join(events) or COMMENT

    return StreamingResponse(send(), media_type=EventStream.media_type, headers=HEADERS)


class EventLog:
    """Keeps the events of one response. An event's index is its sequence number.

    It is what an `EventStream` sends to: comments are left out.

    Args:
        first_events: those before any answer.
    """

    def __init__(self, first_events: list[dict[str, Any]]) -> None:
        self.events: list[bytes] = []
        self._is_complete = False
        self._waiters: set[asyncio.Future[None]] = set()
        self.append(*first_events)

    def append(self, *events: dict[str, Any]) -> None:
        """Keep further events, which get their numbers."""
        self._keep(encode_events(events, len(self.events)))

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Keep the events of an ASGI message, which have their numbers."""
        if message["type"] == "http.response.body":
            self._keep(message["body"])

    def complete(self) -> None:
        """Mark the log as complete."""
        self._is_complete = True
        self._wake()

    async def events_after(self, num_known: int) -> tuple[list[bytes], bool]:
        """Return the events after the first ``num_known``, as soon as there are any or a second is over.

        Returns:
            Those events, and whether they are the last ones.
        """
        if len(self.events) <= num_known and not self._is_complete:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            await asyncio.wait([waiter], timeout=COMMENT_S)
            self._waiters.discard(waiter)
        return self.events[num_known:], self._is_complete

    def _keep(self, encoded: bytes) -> None:
        self.events += [event + _END for event in encoded.split(_END) if event and event != b":"]
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            waiter.get_loop().call_soon_threadsafe(waiter.cancel)
