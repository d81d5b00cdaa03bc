"""line_call: sends the lines of a batch to the endpoints of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deployments.api.application import EndpointApp
from deployments.api.middleware import RecordRequests
from deployments.api.routes import ApiRoute
from deployments.batch.answers import ENDPOINTS
from deployments.batch.in_process import InProcessApp, LineCall
from deployments.request_log.record import RequestRecord

__all__ = ["line_call"]


def line_call(routes: Sequence[ApiRoute], on_end: Callable[[RequestRecord], None]) -> LineCall:
    """Return what sends a line.

    Args:
        routes: endpoints, also those that no batch may name.
        on_end: called with the record of each request when it has ended.
    """
    apps = {
        route.path: RecordRequests(EndpointApp(route.endpoint), on_end) for route in routes if route.path in ENDPOINTS
    }
    return InProcessApp(apps)
