"""Small pieces of ASGI: a bounded body, a stream that is closed whatever happens, request counts.

Nothing here knows the OpenAI API beyond its paths.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import ApiError
from deployments.telemetry import HTTP_REQUESTS, ingress_recorder

__all__ = ["CountRequests", "EventStream", "path_of", "read_body"]

_COUNTED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", "/version"})


def path_of(scope: Scope) -> str:
    """Return a request's path below the application's route_prefix, which ASGI's path includes."""
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
    """Server-sent events whose source is closed when the response ends, also if the client goes away."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(
            _chain(first, rest),
            media_type="text/event-stream",
            headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._source = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


async def _chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for chunk in rest:
        yield chunk


class CountRequests:
    """Middleware that counts answers by path and status."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request and count its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in _COUNTED_PATHS else "other"
                ingress_recorder().increment(HTTP_REQUESTS, path=path, status=str(message["status"]))
            await send(message)

        await self._app(scope, receive, counting_send)
