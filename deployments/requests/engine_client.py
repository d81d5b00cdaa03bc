"""EngineClient: one request's tokens from whichever replica serves it, and what happens if that one falls silent.

It calls the engine deployment through Serve's handle and watches the clock: a replica that sends nothing for
``stall_timeout_s`` without a good reason counts as lost, and a request that takes too long as a whole is ended. What
to do about a loss is the caller's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Protocol

from deployments.errors import ReplicaStalledError, RequestTimeoutError, unwrap
from deployments.requests.attempt import Attempt
from deployments.routing.cluster_view import ClusterView
from engine.errors import EngineDeadError, PagodaError
from engine.outputs import EngineOutput
from engine.request import EngineRequest

__all__ = ["AttemptError", "Dispatch", "EngineClient"]


class AttemptError(PagodaError):
    """A request has failed at one replica: ``cause`` is why, ``replica`` where, or empty if none was reached."""

    def __init__(self, cause: Exception, replica: str) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.replica = replica


class Dispatch(Protocol):
    """Sends a request to one of the engines and returns what streams back."""

    def __call__(self, request: EngineRequest, *, block_hashes: Sequence[int], avoid: Sequence[str]) -> Any:
        """Return an async iterable of EngineOutput with a ``cancel`` method."""


class EngineClient:
    """The engines, as the requests of one ingress process see them.

    Args:
        dispatch: how to reach them.
        view: where requests are, and whether a replica may be silent.
        stall_timeout_s: seconds without a token after which a replica is given up.
        request_timeout_s: seconds that a request may take from its arrival to its last token.
    """

    def __init__(
        self, dispatch: Dispatch, view: ClusterView, *, stall_timeout_s: float, request_timeout_s: float
    ) -> None:
        self._dispatch = dispatch
        self._view = view
        self._stall_timeout_s = stall_timeout_s
        self.request_timeout_s = request_timeout_s

    async def outputs(
        self,
        request: EngineRequest,
        block_hashes: Sequence[int],
        *,
        avoid: Sequence[str],
        deadline: float,
        attempt: Attempt | None = None,
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield what one replica sends, for ever: who has seen the end closes the iterator, and with it the request.

        Args:
            request: the request.
            block_hashes: of its prompt.
            avoid: replicas that have just failed it.
            deadline: on the event loop's clock.
            attempt: where to note when and where that was.

        Raises:
            AttemptError: whatever goes wrong; its cause is ReplicaStalledError if the replica is silent for too long
                without a reason, RequestTimeoutError at the deadline, EngineDeadError if the stream ends before the
                caller has closed it, or what the call raised.
        """
        self._view.begin(request.request_id)
        responses, replica = None, ""
        try:
            responses = self._dispatch(request, block_hashes=block_hashes, avoid=avoid)
            outputs = aiter(responses)
            while (output := await self._next(outputs, request.request_id, deadline)) is not None:
                replica = output.replica
                if attempt is not None:
                    attempt.receive(output)
                yield output
            raise EngineDeadError("the replica ended the stream without a reason")
        except Exception as error:
            replica = getattr(unwrap(error), "replica", "") or replica or self._view.replica_of(request.request_id)
            raise AttemptError(error, replica) from error
        finally:
            if responses is not None:
                responses.cancel()
            if attempt is not None:
                attempt.end(self._view.replica_of(request.request_id), self._view.dispatched_at(request.request_id))
            self._view.end(request.request_id)

    async def _next(
        self, outputs: AsyncIterator[EngineOutput], request_id: str, deadline: float
    ) -> EngineOutput | None:
        """Return the next output, or None behind the last one."""
        try:
            async with asyncio.timeout(None) as scope:
                watch = _Watch(self._view, request_id, scope, self._stall_timeout_s, deadline)
                try:
                    return await anext(outputs, None)
                finally:
                    watch.stop()
        except TimeoutError:
            if watch.verdict is None:  # it came from the replica
                raise
            raise watch.verdict from None


class _Watch:
    """Looks after one wait: ends it through its ``scope`` when it has become hopeless."""

    def __init__(
        self, view: ClusterView, request_id: str, scope: asyncio.Timeout, stall_timeout_s: float, deadline: float
    ) -> None:
        self._view = view
        self._request_id = request_id
        self._scope = scope
        self._stall_timeout_s = stall_timeout_s
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._timer = self._arm(stall_timeout_s)
        self.verdict: Exception | None = None

    def stop(self) -> None:
        """The wait is over."""
        self._timer.cancel()

    def _arm(self, seconds: float) -> asyncio.TimerHandle:
        return self._loop.call_at(min(self._loop.time() + seconds, self._deadline), self._look)

    def _look(self) -> None:
        if self._loop.time() >= self._deadline:
            self.verdict = RequestTimeoutError("the request took longer than this server allows")
        elif allowance := self._view.stall_allowance(self._request_id, self._stall_timeout_s):
            self._timer = self._arm(allowance)
        else:
            self.verdict = ReplicaStalledError(self._view.replica_of(self._request_id), self._stall_timeout_s)
        if self.verdict is not None:
            self._scope.reschedule(self._loop.time())
