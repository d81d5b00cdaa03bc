"""The HTTP application and its routes. An endpoint is a coroutine function that returns a response.

An endpoint's exceptions become error responses here, so that the framework sees none.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api.descriptions import Description
from deployments.api.error_responses import ERROR_HANDLERS, error_response
from deployments.api.middleware import path_of

__all__ = ["Api", "ApiRoute", "Endpoint", "api_route"]

Endpoint = Callable[..., Awaitable[Response]]


class ApiRoute(NamedTuple):
    """An endpoint and what the OpenAPI document says about it, besides the first line of its docstring.

    Attributes:
        path: with parameters in braces, which the endpoint gets by name.
        method: the only method of this route.
        endpoint: gets the request too, if it has a parameter ``request``.
        description: what it takes and returns.
    """

    path: str
    method: str
    endpoint: Endpoint
    description: Description


class Api(Starlette):
    """The HTTP application: Starlette, with a shorter way to the endpoints whose path has no parameters.

    Starlette's own way, through its middleware and all routes before the right one, takes a tenth of a short request.

    Args:
        routes: made by ``api_route``.
        middleware: the first one is the outermost.
        lifespan: entered before the first request.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        middleware: Sequence[Middleware],
        lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]],
    ) -> None:
        super().__init__(routes=routes, middleware=middleware, exception_handlers=ERROR_HANDLERS, lifespan=lifespan)
        self.router.redirect_slashes = False  # it would send clients to whatever host they name
        self._fixed = {
            (method, route.path): _wrapped(route.app, middleware)
            for route in routes
            for method in route.methods or ()
            if "{" not in route.path
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


def api_route(described: ApiRoute) -> Route:
    """Return Starlette's route of an endpoint."""
    route = Route(described.path, _Application(described.endpoint), methods=[described.method])
    route.methods = {described.method}  # Starlette adds HEAD to GET
    return route


class _Application:
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
        await response(scope, receive, send)
