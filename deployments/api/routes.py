"""ApiRoute: an endpoint and the facts about it that metrics, API keys, the log and the OpenAPI document derive from.

An endpoint is a coroutine function that returns a response. Each API has a ``routes`` method or function that returns
its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.responses import Response

from deployments.api.descriptions import Description
from deployments.proxy.paths import OPERATIONS

__all__ = ["ApiRoute", "Endpoint"]

Endpoint = Callable[..., Awaitable[Response]]


class ApiRoute(NamedTuple):
    """An endpoint, and what the OpenAPI document says about it after the first line of its docstring.

    Attributes:
        path: with parameters in braces, which the endpoint gets by name.
        method: of this route, whose endpoint answers HEAD beside GET.
        endpoint: gets the request too, if it has a parameter ``request``.
        description: what it takes and returns.
        needs_key: whether a request for its path needs an API key, once keys are set.
    """

    path: str
    method: str
    endpoint: Endpoint
    description: Description
    needs_key: bool = True

    @property
    def operation(self) -> str | None:
        """OpenTelemetry's name for what an engine computes for a request; None if it computes nothing."""
        return OPERATIONS.get(self.path) if self.method == "POST" else None

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that the endpoint answers: HEAD with each GET (RFC 9110, 9.1)."""
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)

    @property
    def is_fixed(self) -> bool:
        """Whether the path has no parameters. Such paths are labels of metrics; the others are counted together."""
        return "{" not in self.path
