"""EngineClient: sends requests to the engine replicas.

It makes one attempt and reports how that ends. Generation retries and migrates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from deployments.requests.attempt import Attempt
from deployments.requests.attempt_stream import AttemptStream
from deployments.requests.stall_watch import StallWatch
from deployments.routing.cluster_view import ClusterView
from deployments.transport.request_channel.stream import ReplicaStream
from engine.request import EngineRequest

__all__ = ["EngineClient", "Engines"]


class Engines(Protocol):
    """Sends requests to replicas that it chooses."""

    def send(self, request: EngineRequest, *, block_hashes: Sequence[int], avoid: Sequence[str]) -> ReplicaStream:
        """Send a request, now or when a replica takes it; returns the stream of its outputs."""

    def cancel(self, stream: ReplicaStream) -> None:
        """End a stream."""


class EngineClient:
    """The engine replicas, for all requests of one ingress process.

    Args:
        engines: chooses replicas and sends requests to them.
        view: where each request runs, and whether a queue at its replica explains that no token arrives.
        stall_timeout_s: seconds without an output after which a replica counts as lost.
        request_timeout_s: seconds that a request may take from its arrival to its last token.
    """

    def __init__(
        self, engines: Engines, view: ClusterView, *, stall_timeout_s: float, request_timeout_s: float
    ) -> None:
        self._engines = engines
        self._view = view
        self._watch = StallWatch(view, stall_timeout_s=stall_timeout_s)
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
        """
        self._view.begin(request.request_id, streams=not request.params.uses_beam_search)
        try:
            stream = self._engines.send(request, block_hashes=block_hashes, avoid=avoid)
        except BaseException:
            self._view.end(request.request_id)
            raise
        return AttemptStream(stream, self._engines.cancel, self._view, self._watch, attempt, deadline)
