"""The HTTP application: Starlette, with the middleware and a shorter way to most endpoints.

An endpoint's exceptions become error responses here, so that the framework sees none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api.api_keys import ApiKeys, RequireKey
from deployments.api.error_responses import ERROR_HANDLERS, error_response
from deployments.api.middleware import CountRequests, RecordRequests, path_of
from deployments.api.routes import ApiRoute, Endpoint
from deployments.request_log.record import RequestRecord

__all__ = ["Application", "EndpointApp"]

PAGE = "/"  # of the web page, for which a browser prompts its user for a key


class Application(Starlette):
    """The HTTP application.

    Starlette's own way, through its middleware and all routes before the right one, takes a tenth of a short request.
    A request for a path without parameters takes a shorter one.

    Args:
        routes: every endpoint.
        keys: if there are any, every path needs one of them, but for the routes that need none.
        lifespan: entered before the first request.
        on_start: called with the record of each request for tokens when it has arrived.
        on_end: called with the record of each request for tokens when it has ended.
    """

    def __init__(
        self,
        routes: Sequence[ApiRoute],
        keys: ApiKeys,
        lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]],
        *,
        on_start: Callable[[RequestRecord], None],
        on_end: Callable[[RequestRecord], None],
    ) -> None:
        fixed = frozenset(route.path for route in routes if route.is_fixed)
        middleware = [
            Middleware(RecordRequests, on_start=on_start, on_end=on_end),  # the outermost
            Middleware(CountRequests, paths=fixed),
        ]
        if keys:
            open_paths = frozenset(route.path for route in routes if not route.needs_key)
            middleware.append(
                Middleware(RequireKey, keys=keys, open_paths=open_paths, prompts_browser=PAGE in fixed),
            )
        super().__init__(
            routes=[Route(route.path, EndpointApp(route.endpoint), methods=route.methods) for route in routes],
            middleware=middleware,
            exception_handlers=ERROR_HANDLERS,
            lifespan=lifespan,
        )
        self.router.redirect_slashes = False  # it would send clients to whatever host they name
        self._fixed = {
            (method, route.path): _wrapped(EndpointApp(route.endpoint), middleware)
            for route in routes
            if route.is_fixed
            for method in route.methods
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan."""
        app = self._fixed.get((scope["method"], path_of(scope))) if scope["type"] == "http" else None
        if app is None:
            await super().__call__(scope, receive, send)
        else:
            await app(scope, receive, send)


def _wrapped(app: ASGIApp, middleware: Sequence[Middleware]) -> ASGIApp:
    for cls, args, kwargs in reversed(middleware):
        app = cls(app, *args, **kwargs)
    return app


class EndpointApp:
    """An endpoint as an ASGI application."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._takes_request = "request" in inspect.signature(endpoint).parameters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arguments = dict(scope.get("path_params", {}))
        if self._takes_request:
            arguments["request"] = Request(scope, receive, send)
        try:
            response = await self._endpoint(**arguments)
        except Exception as error:
            response = error_response(error)
        if scope["method"] == "HEAD":  # the head that GET would get, and no body, which may have no end
            await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
            await send({"type": "http.response.body"})
        else:
            await response(scope, receive, send)
