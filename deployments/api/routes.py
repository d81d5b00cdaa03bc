"""Routes of the HTTP application. An endpoint is a coroutine function that returns a response.

An endpoint's exceptions become error responses here, so that the framework sees none.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from deployments.api.error_responses import error_response

__all__ = ["Endpoint", "api_route"]

Endpoint = Callable[..., Awaitable[Response]]


def api_route(path: str, method: str, endpoint: Endpoint) -> Route:
    """Return the route of an endpoint.

    Args:
        path: with parameters in braces, which the endpoint gets by name.
        method: the only method that the route accepts.
        endpoint: gets the request too, if it has a parameter ``request``.
    """
    route = Route(path, _Application(endpoint), methods=[method])
    route.methods = {method}  # Starlette adds HEAD to GET
    return route


class _Application:
    """An endpoint as an ASGI application."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._takes_request = "request" in inspect.signature(endpoint).parameters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arguments = dict(scope["path_params"])
        if self._takes_request:
            arguments["request"] = Request(scope, receive, send)
        try:
            response = await self._endpoint(**arguments)
        except Exception as error:
            response = error_response(error)
        await response(scope, receive, send)
