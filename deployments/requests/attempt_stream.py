"""AttemptStream: the outputs that one replica sends for a request, from the dispatch to its end."""

from __future__ import annotations

from collections.abc import Callable

from deployments.errors import unwrap
from deployments.requests.attempt import Attempt
from deployments.requests.stall_watch import StallWatch
from deployments.routing.cluster_view import ClusterView
from deployments.transport.request_channel.stream import ReplicaStream
from engine.errors import PagodaError
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
    """One request to a replica. Closing it aborts the request there, if it is unfinished.

    Args:
        stream: its outputs.
        cancel: ends the stream.
        view: holds where the request is, until the end of the stream.
        watch: ends a wait for a replica that has stalled.
        attempt: records the times of this attempt.
        deadline: when the request times out, on the event loop's clock.
    """

    def __init__(
        self,
        stream: ReplicaStream,
        cancel: Callable[[ReplicaStream], None],
        view: ClusterView,
        watch: StallWatch,
        attempt: Attempt,
        deadline: float,
    ) -> None:
        self._stream = stream
        self._cancel = cancel
        self._view = view
        self._watch = watch
        self._attempt = attempt
        self._is_closed = False
        watch.add(stream, deadline)

    @property
    def replica(self) -> str:
        """The replica that the request was sent to; empty before."""
        return self._view.replica_of(self._stream.request_id)

    async def next(self) -> EngineOutput | None:
        """Return all outputs that have arrived, as one, or None if none has for a second or so.

        The caller closes the stream after the last one.

        Raises:
            AttemptError: whatever goes wrong. Its cause is ReplicaStalledError if the replica sends nothing for too
                long and has no queue that explains it, RequestTimeoutError at the deadline, EngineDeadError if the
                replica is lost, or what the replica has raised.
        """
        try:
            if (output := self._stream.take()) is None:
                await self._stream.wait()
                output = self._stream.take()
        except Exception as error:
            raise self._fail(error) from error
        if output is not None:
            self._attempt.receive(output)
        return output

    def close(self) -> None:
        """End the attempt. Closing twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        request_id = self._stream.request_id
        self._watch.remove(self._stream)
        self._cancel(self._stream)
        self._attempt.end(self.replica, self._view.dispatched_at(request_id))
        self._view.end(request_id)

    def _fail(self, error: Exception) -> AttemptError:
        """Close the stream; return the error to raise."""
        cause = unwrap(error)
        replica = getattr(cause, "replica", "") or self._attempt.replica or self.replica
        self.close()
        self._attempt.replica, self._attempt.error = replica, type(cause).__name__
        return AttemptError(cause, replica)
