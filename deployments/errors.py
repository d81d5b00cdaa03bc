"""ApiError: the answer to a failed HTTP request, and the conversion of other exceptions to it.

It knows the OpenAI error body and HTTP status codes. It does not know routes.
"""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

from ray.exceptions import NodeDiedError, RayActorError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import ClientDisconnect

from engine.errors import EngineDeadError, OverloadedError, PagodaError, RequestError

__all__ = [
    "ApiError",
    "ReplicaStalledError",
    "ReplicasLostError",
    "RequestTimeoutError",
    "UnusableOutputError",
    "as_api_error",
    "is_replica_loss",
    "unwrap",
]

logger = logging.getLogger("ray.serve")

MAX_MESSAGE_LENGTH = 400
_RETRY_OVERLOADED_S = 5  # a grammar that takes longer to compile is rejected by then
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    501: "not_implemented_error",
    499: "client_closed_request",
    503: "overloaded_error",
}
# Of a file. Remedies name the API's own paths, and "#/definitions/x" is a pointer into a client's schema.
_PATH = re.compile(r"(?<![\w.:/#])/(?!v1/)(?:[\w.@+-]+/)+[\w.@+-]*")


class ApiError(PagodaError):
    """The answer to a failed HTTP request: status and OpenAI error body.

    Args:
        status: HTTP status code.
        message: text for the client, cut to 400 characters.
        param: the parameter that is wrong.
        code: short name of the error for programs.
        retry_after_s: seconds of the Retry-After header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        message = message.encode(errors="backslashreplace").decode()  # an unpaired surrogate cannot be sent back
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE_LENGTH else message[: MAX_MESSAGE_LENGTH - 1] + "…"
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """The error body of the OpenAI API."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Extra response headers."""
        if self.status == 501:
            return {"X-Should-Retry": "false"}  # the clients of OpenAI and Anthropic retry every other 5xx
        if self.status == 415:
            return {"Accept-Encoding": "identity"}  # RFC 9110, 12.5.3
        if self.status in (408, 413):
            return {"Connection": "close"}  # the rest of the body may still come
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


class ReplicaStalledError(PagodaError):
    """A replica has sent nothing for so long that it counts as lost."""

    def __init__(self, replica: str, seconds: float) -> None:
        super().__init__(f"replica {replica} sent nothing for {seconds:g} s")
        self.replica = replica


class ReplicasLostError(PagodaError):
    """More replicas were lost while they served one answer than it survives."""

    def __init__(self, num_lost: int) -> None:
        super().__init__(f"{num_lost} replicas were lost while they served this request; try again")


class RequestTimeoutError(PagodaError):
    """A request took longer than request_timeout_s."""


class UnusableOutputError(PagodaError):
    """The model has computed something for one text that no client can use, such as NaN."""


_LOSSES = (
    EngineDeadError,
    ReplicaStalledError,
    DeploymentUnavailableError,
    RayActorError,
    NodeDiedError,
    WorkerCrashedError,
)


def unwrap(error: Exception) -> Exception:
    """Return the exception that a replica raised, without Ray's wrapper."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(error, RayTaskError) and isinstance(cause, Exception) else error


def is_replica_loss(error: Exception) -> bool:
    """Whether the replica failed, not the request: the same request may succeed on another replica."""
    error = unwrap(error)
    # Over gRPC a dead replica sometimes raises grpc.aio.AioRpcError; compared by name, so that grpc stays optional.
    return isinstance(error, _LOSSES) or type(error).__name__ == "AioRpcError"


def _without_paths(error: RequestError) -> RequestError:
    """Return an error that names no file of this machine; the value in it is the client's own."""
    hidden = copy.copy(error)
    hidden.problem = _PATH.sub("<path>", error.problem)
    hidden.remedy = None if error.remedy is None else _PATH.sub("<path>", error.remedy)
    return hidden


def as_api_error(error: Exception) -> ApiError:
    """Return the answer for any exception. The text of an unexpected one is logged, not sent."""
    error = unwrap(error)
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverloadedError):
        return ApiError(503, str(error), param=error.param, code="overloaded", retry_after_s=_RETRY_OVERLOADED_S)
    if isinstance(error, RequestError):
        return ApiError(400, str(_without_paths(error)), param=error.param)
    if isinstance(error, RequestTimeoutError):
        return ApiError(408, str(error), code="timeout")
    if isinstance(error, ClientDisconnect):
        return ApiError(499, "the client went away")
    if isinstance(error, BackPressureError):
        return ApiError(
            503, "all replicas are busy and the queue is full; try again shortly", code="overloaded", retry_after_s=1
        )
    if isinstance(error, ReplicasLostError):
        return ApiError(503, str(error), code="replica_lost", retry_after_s=1)
    if isinstance(error, UnusableOutputError):
        return ApiError(500, str(error), code="unusable_output")
    if is_replica_loss(error):
        logger.warning("a replica was lost: %s", type(error).__name__)
        return ApiError(
            503, "the replica that served this request was lost; try again", code="replica_lost", retry_after_s=1
        )
    logger.error("a request failed with an unexpected error", exc_info=error)
    return ApiError(500, "internal error; the server's log says more", code="internal_error")
