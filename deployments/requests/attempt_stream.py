"""AttemptStream: the outputs that one replica sends for a request, from the call to its end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from deployments.errors import unwrap
from deployments.requests.attempt import Attempt
from deployments.requests.stall_watch import StallWatch
from deployments.routing.cluster_view import ClusterView
from engine.errors import EngineDeadError, PagodaError
from engine.outputs import EngineOutput

__all__ = ["AttemptError", "AttemptStream"]


class AttemptError(PagodaError):
    """A replica was lost, was full, rejected the request, or failed while it served it.

    Attributes:
        cause: the error, without Ray's wrapper.
        replica: where it happened; empty if no replica was reached.
    """

    def __init__(self, cause: Exception, replica: str) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.replica = replica


class AttemptStream:
    """One call of the engine deployment. Closing the stream cancels the call, and the replica aborts the sequence.

    Args:
        call: makes the call; returns an async iterable of EngineOutput with a ``cancel`` method.
        request_id: the request's id in ``view``.
        view: holds where the request is, from the call to the end of the stream.
        watch: ends a wait for a replica that has stalled.
        attempt: records the times of this attempt.

    Raises:
        AttemptError: if the call cannot be made.
    """

    def __init__(
        self, call: Callable[[], Any], request_id: str, view: ClusterView, watch: StallWatch, attempt: Attempt
    ) -> None:
        self._request_id = request_id
        self._view = view
        self._watch = watch
        self._attempt = attempt
        self._responses: Any = None
        self._is_closed = False
        view.begin(request_id)
        try:
            self._responses = call()
            self._outputs: AsyncIterator[EngineOutput] = aiter(self._responses)
        except Exception as error:
            raise self._fail(error) from error

    async def next(self) -> EngineOutput:
        """Return the next output; the caller closes the stream after the last one.

        Raises:
            AttemptError: whatever goes wrong. Its cause is ReplicaStalledError if the replica sends nothing for too
                long and has no queue that explains it, RequestTimeoutError at the deadline, EngineDeadError if the
                stream ends before the caller has closed it, or what the replica raised.
        """
        try:
            output = await self._watch.wait_for(anext(self._outputs, None))
            if output is None:
                raise EngineDeadError("the replica ended the stream before a finish_reason")
        except Exception as error:
            raise self._fail(error) from error
        self._attempt.receive(output)
        return output

    def close(self) -> None:
        """End the attempt; cancels the call if the replica still serves it. Closing twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        self._watch.stop()
        if self._responses is not None:
            self._responses.cancel()
        self._attempt.end(self._view.replica_of(self._request_id), self._view.dispatched_at(self._request_id))
        self._view.end(self._request_id)

    def _fail(self, error: Exception) -> AttemptError:
        """Close the stream; return the error to raise."""
        cause = unwrap(error)
        replica = getattr(cause, "replica", "") or self._attempt.replica or self._view.replica_of(self._request_id)
        self.close()
        self._attempt.replica, self._attempt.error = replica, type(cause).__name__
        return AttemptError(cause, replica)
