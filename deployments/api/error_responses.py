"""Error responses: an exception becomes the error body of the request's API and is put into the request's record.

That is the OpenAI API, except below /v1/messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ExceptionHandler

from deployments.api.json_response import JsonResponse
from deployments.errors import ApiError, as_api_error
from deployments.proxy.paths import is_messages_path
from deployments.request_log.record import find_record, record_error

__all__ = ["ERROR_HANDLERS", "error_body", "error_response", "record_api_error"]

# The ``type`` of an error in the Messages API, by status.
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error, in the form of the API that the current request's path belongs to."""
    record = find_record()
    if record is None or not is_messages_path(record.path):
        return error.body
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _MESSAGES_TYPES.get(error.status, default)
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": record.request_id}


def record_api_error(error: Exception) -> ApiError:
    """Return the error that the client gets for ``error``; put it into the request's record."""
    api_error = as_api_error(error)
    record_error(api_error)
    return api_error


def error_response(error: Exception) -> Response:
    """Return the response to a request that failed with ``error``."""
    api_error = record_api_error(error)
    return JsonResponse(error_body(api_error), api_error.status, headers=api_error.headers)


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    if error.status_code != 405:
        reason = f"{path} does not exist" if error.status_code == 404 else str(error.detail)
        return error_response(ApiError(error.status_code, reason))
    accepted = ", ".join(sorted(_methods_of_path(request)))
    response = error_response(ApiError(405, f"{path} does not accept {request.method}; it accepts {accepted}"))
    response.headers["Allow"] = accepted  # RFC 9110, 15.5.6
    return response


def _methods_of_path(request: Request) -> set[str]:
    """Return the methods of all routes of a request's path."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in matching for method in route.methods or ()}


# Answer what fails outside an endpoint: unknown paths and methods.
ERROR_HANDLERS: Mapping[Any, ExceptionHandler] = {Exception: _on_error, HTTPException: _on_http_error}
