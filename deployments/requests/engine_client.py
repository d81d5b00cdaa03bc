"""EngineClient: sends requests to the engine replicas, through Serve's handle and its router.

It makes one attempt and reports how that ends. Generation retries and migrates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from deployments.requests.attempt import Attempt
from deployments.requests.attempt_stream import AttemptStream
from deployments.requests.stall_watch import StallWatch
from deployments.routing.cluster_view import ClusterView
from engine.request import EngineRequest

__all__ = ["Dispatch", "EngineClient"]


class Dispatch(Protocol):
    """Calls ``EngineReplica.generate`` on the replica that the router chooses."""

    def __call__(self, request: EngineRequest, *, block_hashes: Sequence[int], avoid: Sequence[str]) -> Any:
        """Return an async iterable of EngineOutput with a ``cancel`` method."""


class EngineClient:
    """The engine replicas, for all requests of one ingress process.

    Args:
        dispatch: makes the call.
        view: where each request runs, and whether a queue at its replica explains that no token arrives.
        stall_timeout_s: seconds without an output after which a replica counts as lost.
        request_timeout_s: seconds that a request may take from its arrival to its last token.
    """

    def __init__(
        self, dispatch: Dispatch, view: ClusterView, *, stall_timeout_s: float, request_timeout_s: float
    ) -> None:
        self._dispatch = dispatch
        self._view = view
        self._stall_timeout_s = stall_timeout_s
        self.request_timeout_s = request_timeout_s

    def send(
        self,
        request: EngineRequest,
        block_hashes: Sequence[int],
        *,
        avoid: Sequence[str],
        deadline: float,
        attempt: Attempt,
    ) -> AttemptStream:
        """Send a request to a replica; the caller closes the stream that this returns.

        Args:
            request: the prompt, and the output tokens that other replicas have generated.
            block_hashes: of the prompt's full blocks.
            avoid: replicas that have just failed this request.
            deadline: when the request times out, on the event loop's clock.
            attempt: records the times of this attempt.

        Raises:
            AttemptError: if the call cannot be made.
        """
        request_id = request.request_id
        watch = StallWatch(self._view, request_id, stall_timeout_s=self._stall_timeout_s, deadline=deadline)
        call = partial(self._dispatch, request, block_hashes=block_hashes, avoid=avoid)
        return AttemptStream(call, request_id, self._view, watch, attempt)
