"""EventLog: the events of a response that is streamed in the background, for any client that follows them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from deployments.api.json_response import encode_json
from deployments.api.sse import COMMENT, COMMENT_S

__all__ = ["EventLog", "LaterEvents", "follow"]

_END = b"\n\n"  # of an event

LaterEvents = Callable[[int], Awaitable[tuple[list[bytes], bool]]]  # number of those known -> the next, if they end


class EventLog:
    """Keeps the events of one response. An event's index is its sequence number.

    It is what an `EventStream` sends to: comments are left out.
    """

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self._has_ended = False
        self._waiters: list[asyncio.Future[None]] = []

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Keep the events of an ASGI message."""
        if message["type"] == "http.response.body":
            self.events += [event + _END for event in message["body"].split(_END) if event and event != b":"]
            self._wake()

    def fail(self, response: dict[str, Any]) -> None:
        """Append the event of a response that has failed."""
        event = {"type": "response.failed", "response": response, "sequence_number": len(self.events)}
        encoded = f"event: response.failed\ndata: {encode_json(event)}\n\n"
        self.events.append(encoded.encode(errors="backslashreplace"))

    def last_response(self) -> dict[str, Any]:
        """Return the response of the last event."""
        response: dict[str, Any] = json.loads(self.events[-1].partition(b"data: ")[2])["response"]
        return response

    def end(self) -> None:
        """Say that no more events come."""
        self._has_ended = True
        self._wake()

    async def later(self, num_known: int) -> tuple[list[bytes], bool]:
        """Return the events after the first ``num_known``, as soon as there are any or a second is over.

        Returns:
            Those events, and whether they are the last ones.
        """
        if len(self.events) <= num_known and not self._has_ended:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await asyncio.wait([waiter], timeout=COMMENT_S)
            waiter.cancel()
        return self.events[num_known:], self._has_ended

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.get_loop().call_soon_threadsafe(waiter.cancel)


async def follow(later: LaterEvents, first: int = 0) -> AsyncIterator[bytes]:
    """Yield events from the index ``first`` on, and comments while there are none."""
    has_ended = False
    while not has_ended:
        events, has_ended = await later(first)
        first += len(events)
        if events or not has_ended:
            yield b"".join(events) or COMMENT
