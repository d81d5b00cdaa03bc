"""ASGI helpers: a body of bounded size, an event stream that always closes its source, and two middlewares.

The middlewares count responses, and give each request an id and a record. Of the OpenAI API this module knows only the
paths.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from time import monotonic

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import ApiError
from deployments.observability.ingress_metrics import HTTP_REQUESTS, ingress_recorder
from deployments.requests.record import OPERATIONS, RequestRecord, set_current_record

__all__ = ["CountRequests", "EventStream", "RecordRequests", "path_of", "read_body"]

logger = logging.getLogger("ray.serve")

_COUNTED_PATHS = frozenset(
    {"/", "/live", "/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ping", "/metrics", "/version"}
)
_TRACE_HEADERS = ("traceparent", "tracestate")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def path_of(scope: Scope) -> str:
    """Return a request's path without the application's route_prefix, which ASGI's path includes."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    below = path.removeprefix(root)
    return below if below.startswith("/") else path


async def read_body(request: Request, limit: int) -> bytes:
    """Return a JSON body of at most ``limit`` bytes.

    Raises:
        ApiError: 400 for another content type, 413 for a longer body, before it is read to its end.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(400, f"content-type '{kind[:80]}' is not taken; send application/json")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body exceeds {limit} bytes; send less, or raise limits.max_body_bytes")


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


class CountRequests:
    """Middleware that counts responses by path and status."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request and count its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = path_of(scope)
                counted = path if path in _COUNTED_PATHS else "other"
                ingress_recorder().increment(HTTP_REQUESTS, path=counted, status=str(message["status"]))
            await send(message)

        await self._app(scope, receive, counting_send)


class RecordRequests:
    """Middleware that gives every request an id and a record.

    Args:
        app: the application that serves the requests.
        on_end: called with the record of each request for tokens when it has ended, for any reason.
    """

    def __init__(self, app: ASGIApp, on_end: Callable[[RequestRecord], None]) -> None:
        self._app = app
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request with a record."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        record = RequestRecord(request_id, path_of(scope))
        set_current_record(record)

        async def recording_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.sent_status = message["status"]
                if request_id != given:  # Serve itself returns an id that came with the request
                    MutableHeaders(scope=message).append("X-Request-Id", request_id)
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                record.is_complete = True

        if scope["method"] != "POST" or record.path not in OPERATIONS:
            await self._app(scope, receive, recording_send)
            return
        record.trace_context = {name: headers[name] for name in _TRACE_HEADERS if name in headers}
        try:
            await self._app(scope, receive, recording_send)
        finally:
            record.ended = monotonic()
            self._finish(record)

    def _finish(self, record: RequestRecord) -> None:
        try:
            self._on_end(record)
        except Exception:  # the client already has its response
            logger.exception("the record of a request could not be written")
