"""Error responses: an exception becomes the OpenAI error body and is put into the request's record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from deployments.api.json_response import JsonResponse
from deployments.errors import ApiError, as_api_error
from deployments.requests.record import record_error

__all__ = ["ERROR_HANDLERS", "error_response", "record_api_error"]


def record_api_error(error: Exception) -> ApiError:
    """Return the error that the client gets for ``error``; put it into the request's record."""
    api_error = as_api_error(error)
    record_error(api_error)
    return api_error


def error_response(error: Exception) -> Response:
    """Return the response to a request that failed with ``error``."""
    api_error = record_api_error(error)
    return JsonResponse(api_error.body, api_error.status, headers=api_error.headers)


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    reasons = {404: f"{path} does not exist", 405: f"{path} does not accept {request.method}"}
    return error_response(ApiError(error.status_code, reasons.get(error.status_code, str(error.detail))))


# Answer what fails outside an endpoint: unknown paths and methods.
ERROR_HANDLERS: Mapping[Any, ExceptionHandler] = {Exception: _on_error, HTTPException: _on_http_error}
