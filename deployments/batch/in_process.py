"""LineCall: sends a line to its endpoint within this process, as an HTTP request that needs no key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from deployments.proxy.client_rules import CLIENT_HEADER

__all__ = ["Answer", "InProcessApp", "LineCall"]


class Answer(NamedTuple):
    """An HTTP response."""

    status: int
    request_id: str
    body: bytes


# (path, body, request id, client between whose requests the engines take turns) -> the response
LineCall = Callable[[str, bytes, str, str], Awaitable[Answer]]


class InProcessApp:
    """The endpoints that a batch may name.

    Args:
        apps: by path; each records its requests.
    """

    def __init__(self, apps: Mapping[str, ASGIApp]) -> None:
        self._apps = apps

    async def __call__(self, path: str, body: bytes, request_id: str, client: str) -> Answer:
        """Return the response to a POST request. Cancelling the call aborts the request."""
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": request_id,
            CLIENT_HEADER: client,
        }
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "server": None,
            "client": None,
        }
        status, parts, is_read = 500, [], False

        async def receive() -> Message:
            nonlocal is_read
            if is_read:
                await asyncio.Future()  # the client never disconnects
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        await self._apps[path](scope, receive, send)
        return Answer(status, request_id, b"".join(parts))
