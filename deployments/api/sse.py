"""EventStream: the response that sends the server-sent events of a streamed answer.

The events are the chunks of all choices, the usage, and how the answer ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from time import monotonic

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.api.error_responses import record_api_error
from deployments.api.middleware import direct_send
from deployments.api.writers import EventWriter
from deployments.requests.generation import Delta

__all__ = ["COMMENT", "COMMENT_S", "HEADERS", "EventStream"]

COMMENT = b":\n\n"  # which clients ignore
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies pass events on at once
COMMENT_S = 1.0  # after which something is written, so that a client that has gone is noticed


class EventStream(Response):
    """A response of server-sent events. The deltas are closed at its end, also if the client disconnects.

    The start and the end of the response pass all middleware, its chunks none.

    Deltas that come while the socket is busy wait in their stream, which joins them. While there are none to write, or
    a parser holds back their text, comments are written. So proxies do not take the connection for dead, and it is
    noticed if the client has gone (see deployments/proxy/backends.py).

    Args:
        first: the first delta. It exists before the response starts, so that an error until then has its own status.
            None if it takes longer than a second.
        deltas: yields the other deltas of all choices, and None while there are none.
        events: writes the events.
        headers: in addition to those of an event stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Delta | None,
        deltas: AsyncGenerator[Delta | None, None],
        events: EventWriter,
        headers: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._deltas = deltas
        self._events = events
        self._num_unfinished = events.num_choices
        self._first = self._write(first)
        self.init_headers({**headers, **HEADERS})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, until the answers end or the client disconnects."""
        listening: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(None) as sending:
                listening = asyncio.create_task(_end_at_disconnect(receive, sending))
                await self._send_events(direct_send(scope, send), send)
        except TimeoutError:
            if not sending.expired():
                raise
        finally:
            if listening is not None:
                listening.cancel()
            await self._deltas.aclose()

    async def _send_events(self, send_chunk: Send, send: Send) -> None:
        """Send the head and the events; the last events are the end of the response."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        events, written = self._first, monotonic()
        while self._num_unfinished:
            if not events and monotonic() - written > COMMENT_S:  # a parser holds back the text of these deltas
                events = COMMENT
            if events:
                await send_chunk({"type": "http.response.body", "body": events, "more_body": True})
                written = monotonic()
            events = await self._next()
        await self._deltas.aclose()
        await send({"type": "http.response.body", "body": events, "more_body": False})

    async def _next(self) -> bytes:
        """Return the next event; after the last delta, and after an error, all that remain."""
        try:
            return self._write(await anext(self._deltas))
        except Exception as error:
            self._num_unfinished = 0
            return self._events.error(record_api_error(error))

    def _write(self, delta: Delta | None) -> bytes:
        if delta is None:
            return COMMENT
        event = self._events.chunk(delta)
        if delta.finish_reason is not None:
            self._num_unfinished -= 1
        return event if self._num_unfinished else event + self._events.end()


async def _end_at_disconnect(receive: Receive, sending: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    sending.reschedule(asyncio.get_running_loop().time())
