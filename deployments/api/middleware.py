"""ASGI middleware: counts responses, and gives each request an id and a record.

It knows which paths generate tokens and which belong to the Messages API, and nothing else of any API.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Container
from time import monotonic

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.observability.ingress_metrics import HTTP_REQUESTS, ingress_recorder
from deployments.proxy.client_rules import CLIENT_HEADER, REQUEST_ID
from deployments.proxy.paths import OPERATIONS, is_messages_path
from deployments.request_log.record import RequestRecord, set_current_record

__all__ = ["CountRequests", "RecordRequests", "direct_send", "path_of"]

logger = logging.getLogger("ray.serve")

_SEND = "pagoda.send"  # the key of a scope that holds the server's own ``send``
_TRACE_HEADERS = ("traceparent", "tracestate")
_REQUEST_ID = re.compile(REQUEST_ID)


def path_of(scope: Scope) -> str:
    """Return a request's path without the application's route_prefix, which ASGI's path includes."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    below = path.removeprefix(root)
    return below if below.startswith("/") else path


def direct_send(scope: Scope, send: Send) -> Send:
    """Return the ``send`` that passes no middleware, for the chunks of a stream; ``send`` if the scope has none."""
    direct: Send = scope.get(_SEND, send)
    return direct


class CountRequests:
    """Middleware that counts responses by path and status.

    Args:
        app: the application that serves the requests.
        paths: those that are counted by their names; the others are counted together.
    """

    def __init__(self, app: ASGIApp, paths: Container[str]) -> None:
        self._app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request and count its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = path_of(scope)
                counted = path if path in self._paths else "other"
                ingress_recorder().increment(HTTP_REQUESTS, path=counted, status=str(message["status"]))
            await send(message)

        await self._app(scope, receive, counting_send)


class RecordRequests:
    """Middleware that gives every request an id and a record. It is the outermost one.

    Args:
        app: the application that serves the requests.
        on_end: called with the record of each request for tokens when it has ended, for any reason; what is answered in
            the background ends then.
        on_start: called with the record of each request for tokens when it has arrived.
    """

    def __init__(
        self,
        app: ASGIApp,
        on_end: Callable[[RequestRecord], None],
        on_start: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        self._app = app
        self._on_start = on_start
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request with a record."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        record = RequestRecord(request_id, path_of(scope), headers.get(CLIENT_HEADER, ""))
        set_current_record(record)
        scope[_SEND] = send

        async def recording_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.sent_status = message["status"]
                if request_id != given:  # Serve itself returns an id that came with the request
                    MutableHeaders(scope=message).append("X-Request-Id", request_id)
                if is_messages_path(record.path):
                    MutableHeaders(scope=message).append("Request-Id", request_id)
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                record.is_complete = True

        if scope["method"] != "POST" or record.path not in OPERATIONS:
            await self._app(scope, receive, recording_send)
            return
        self._on_start(record)
        record.trace_context = {name: headers[name] for name in _TRACE_HEADERS if name in headers}
        try:
            await self._app(scope, receive, recording_send)
        finally:
            if record.background is None:
                self._finish(record)
            else:
                record.background.add_done_callback(lambda _: self._finish(record))

    def _finish(self, record: RequestRecord) -> None:
        record.ended = monotonic()
        try:
            self._on_end(record)
        except Exception:  # the client already has its response
            logger.exception("the record of a request could not be written")
        finally:
            record.release()
