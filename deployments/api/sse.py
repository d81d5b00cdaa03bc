"""Server-sent events: the response that sends them, and the events of a streamed answer.

The events are the chunks of all choices, the usage, and how the answer ended.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from deployments.api.error_responses import record_api_error
from deployments.api.protocol import GenerationRequest
from deployments.api.responses import ResponseWriter, usage
from deployments.requests.generation import Delta, Generation
from deployments.requests.merge import merge

__all__ = ["EventStream", "stream_events"]

DONE = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """A response of server-sent events. Their source is closed at its end, also if the client disconnects.

    Args:
        first: the first event. It exists before the response starts, so that an error until then has its own status.
        rest: yields the other events.
        headers: besides those of an event stream.
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(
            rest,
            media_type="text/event-stream",
            headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._rest.aclose()

    async def stream_response(self, send: Send) -> None:
        """Send the head, the events and the end."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._rest:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def stream_events(
    writer: ResponseWriter, generations: Sequence[Generation], body: GenerationRequest
) -> AsyncGenerator[bytes, None]:
    """Yield a stream's events. An error before the first event is raised, a later one becomes an event."""
    started: set[int] = set()  # the choices that have had a chunk
    try:
        async with aclosing(merge([generation.deltas() for generation in generations])) as deltas:
            async for delta in deltas:
                yield _chunk(writer, generations, delta, body, first=delta.index not in started)
                started.add(delta.index)
        if body.stream_options is not None and body.stream_options.include_usage:
            yield _event(writer.usage_chunk(usage(generations, body.num_generated)))
    except Exception as error:
        if not started:
            raise
        yield _event(record_api_error(error).body)
    yield DONE


def _chunk(
    writer: ResponseWriter, generations: Sequence[Generation], delta: Delta, body: GenerationRequest, *, first: bool
) -> bytes:
    chunk = writer.delta_chunk(delta, generations[delta.index], first=first)
    options = body.stream_options
    if options is not None and options.continuous_usage_stats:
        chunk["usage"] = usage(generations, body.num_generated)
    elif options is not None and options.include_usage:
        chunk["usage"] = None
    return _event(chunk)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
