"""Errors of requests on the wire, with the fields of RequestError.

``ReplicaFullError`` and ``ReplicaDrainingError`` are not failures of the request: another replica may take it, and
nothing was computed. Nor is ``HandedOverError``: another replica continues the request. ``StreamPausedError`` is raised
in the ingress only.

A HandedOverError travels as an EngineDeadError with a mark, which an ingress of the last version does not read: to it,
the replica is lost, so it continues the request elsewhere.
"""

from __future__ import annotations

from typing import Final

from deployments.transport.request_channel.messages import Failure
from engine.errors import EngineDeadError, OverloadedError, PagodaError, PromptTooLongError, RequestError

__all__ = [
    "HandedOverError",
    "ReplicaDrainingError",
    "ReplicaFullError",
    "StreamPausedError",
    "error_of",
    "failure_of",
]


class ReplicaFullError(PagodaError):
    """A replica has as many requests as it takes."""


class ReplicaDrainingError(PagodaError):
    """A replica that shuts down takes no more requests."""


class HandedOverError(PagodaError):
    """A replica that shuts down has ended an unfinished request; it serves the request's KV until it ends."""

    replica = ""


class StreamPausedError(PagodaError):
    """The reader of a stream lags, so its request was aborted; it may continue once all outputs were taken."""


_REQUEST_ERRORS: dict[str, type[RequestError]] = {
    kind.__name__: kind for kind in (RequestError, PromptTooLongError, OverloadedError)
}
_OTHERS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ReplicaFullError, ReplicaDrainingError, EngineDeadError)
}
_HANDED_OVER: Final = "handed_over"  # the part of a Failure


def failure_of(stream: int, error: Exception) -> Failure:
    """Return the error of a stream as a message."""
    kind = type(error).__name__
    if isinstance(error, RequestError) and kind in _REQUEST_ERRORS:
        return Failure(stream, kind, error.problem, error.param, error.part, error.value, error.remedy)
    if isinstance(error, HandedOverError):
        return Failure(stream, EngineDeadError.__name__, str(error), part=_HANDED_OVER)
    return Failure(stream, kind, str(error))


def error_of(failure: Failure, replica: str) -> Exception:
    """Return the error in a message; of an unknown kind, a RuntimeError.

    Args:
        failure: the message.
        replica: name of the replica that has sent it.
    """
    if (of_request := _REQUEST_ERRORS.get(failure.kind)) is not None:
        error = of_request(failure.message, param=failure.param, part=failure.part, remedy=failure.remedy)
        error.value = failure.value  # it is text already
        if isinstance(error, OverloadedError):
            error.replica = replica
        return error
    kind = HandedOverError if failure.part == _HANDED_OVER else _OTHERS.get(failure.kind, RuntimeError)
    other = kind(failure.message)
    if isinstance(other, EngineDeadError | HandedOverError):
        other.replica = replica
    return other
