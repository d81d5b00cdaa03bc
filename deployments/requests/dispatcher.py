"""Dispatcher: sends each request of an ingress to the replica that the view ranks first.

A request that no replica takes now waits here: because there is none yet, or because all are full. Waiting requests
are sent in the order of their arrival. A replica that is full or shuts down returns a request, which then goes to
another one; the request's reader does not notice.

While a request waits and no replica is connected, one call through Serve's handle is pending, which Serve's autoscaler
counts as a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from deployments.observability.ingress_metrics import ROUTING_DECISION_SECONDS, ROUTING_DECISIONS, ingress_recorder
from deployments.routing.cluster_view import ClusterView
from deployments.transport.request_channel.link import Link
from deployments.transport.request_channel.links import Links
from deployments.transport.request_channel.stream import ReplicaStream
from engine.errors import RequestError
from engine.request import EngineRequest

__all__ = ["Dispatcher"]

FULL_S = 0.1  # a replica that has returned a request is asked again after so many seconds
WAKE_INTERVAL_S = 0.5


@dataclass(slots=True, eq=False)
class _Call:
    """A request and where it is."""

    request: EngineRequest
    block_hashes: Sequence[int]
    avoid: Sequence[str]
    link: Link | None = None  # None: it waits


class Dispatcher:
    """Sends the requests of one ingress process to the engine replicas.

    Args:
        view: ranks the replicas, and knows where each request is.
        wake: calls any replica through Serve's handle; waits while there is none.
        max_requests: unfinished requests of this ingress at one replica.
    """

    def __init__(self, view: ClusterView, wake: Callable[[], Awaitable[object]], *, max_requests: int) -> None:
        self._view = view
        self._wake = wake
        self._max_requests = max_requests
        self._calls: dict[ReplicaStream, _Call] = {}
        self._waiting: dict[ReplicaStream, _Call] = {}  # the first to send first
        self._full_until: dict[str, float] = {}  # replica -> time of the event loop
        self._waking: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._links: Links | None = None

    def start(self) -> None:
        """Connect to the replicas in the view, now and whenever they change. Call it on the event loop of requests."""
        self._loop = asyncio.get_running_loop()
        self._links = Links(on_change=self._send_waiting, on_returned=self._take_back)
        self._view.watch(self._links.set_replicas)

    def close(self) -> None:
        """Close the connections; unfinished requests fail."""
        if self._links is not None:
            self._view.watch(lambda metadata: None)
            self._links.close()
        if self._waking is not None:
            self._waking.cancel()
        if self._retry is not None:
            self._retry.cancel()

    def send(self, request: EngineRequest, *, block_hashes: Sequence[int], avoid: Sequence[str]) -> ReplicaStream:
        """Send a request, now or when a replica takes it; returns the stream of its outputs.

        Args:
            request: the prompt, and the output tokens that other replicas have generated.
            block_hashes: of the prompt's full blocks.
            avoid: replicas that have just failed this request.
        """
        stream = ReplicaStream(request.request_id)
        call = _Call(request, block_hashes, avoid)
        if self._waiting or not self._try_send(stream, call):
            self._waiting[stream] = call
            self._wake_replicas()
        self._calls[stream] = call
        return stream

    def cancel(self, stream: ReplicaStream) -> None:
        """End a stream; its reader has got all that it wants. Cancelling twice is harmless."""
        call = self._calls.pop(stream, None)
        if call is None:
            return
        self._waiting.pop(stream, None)
        if call.link is not None:
            call.link.cancel(stream)
        self._send_waiting()

    # --- replicas ---------------------------------------------------------------------------------------------------

    def _try_send(self, stream: ReplicaStream, call: _Call) -> bool:
        """Send a request to the best replica that takes one; False if none does."""
        assert self._links is not None, "start() was not called"
        candidates = [name for name in self._links.ready if self._has_room(name)]
        if not candidates:
            return False
        request, started = call.request, perf_counter()
        decision = self._view.choose(candidates, call.block_hashes, request.num_tokens, call.avoid, request.request_id)
        ingress_recorder().increment(ROUTING_DECISIONS, outcome=decision.outcome)
        ingress_recorder().observe(ROUTING_DECISION_SECONDS, perf_counter() - started)
        replica = decision.order[0]
        try:
            self._links[replica].submit(request, call.block_hashes, stream)
        except RequestError as error:
            stream.fail(error)
            return True
        call.link = self._links[replica]
        self._view.dispatch(request.request_id, replica, call.block_hashes, request.num_tokens)
        return True

    def _has_room(self, replica: str) -> bool:
        assert self._links is not None
        if self._full_until and self._full_until.get(replica, 0.0) > self._loop.time():
            return False
        return self._links[replica].num_streams < self._max_requests

    def _take_back(self, stream: ReplicaStream, error: Exception) -> None:
        """Let a request that its replica has not taken wait for another one, before all that came later."""
        del error
        call = self._calls.get(stream)
        if call is None or call.link is None:
            return
        now = self._loop.time()
        self._full_until = {name: until for name, until in self._full_until.items() if until > now}
        self._full_until[call.link.replica] = now + FULL_S
        call.link = None
        self._view.unassign(stream.request_id)
        self._waiting = {stream: call} | self._waiting
        self._loop.call_soon(self._send_waiting)  # after the rest of the message: it may return more
        self._wake_replicas()

    def _send_waiting(self) -> None:
        """Send waiting requests while a replica takes them."""
        while self._waiting:
            stream, call = next(iter(self._waiting.items()))
            if not self._try_send(stream, call):
                break
            self._waiting.pop(stream, None)
        if self._waiting and self._full_until and self._retry is None:
            self._retry = self._loop.call_later(FULL_S, self._send_again)

    def _send_again(self) -> None:
        self._retry = None
        self._send_waiting()

    # --- scaling from zero ------------------------------------------------------------------------------------------

    def _wake_replicas(self) -> None:
        if self._waking is None or self._waking.done():
            # In a context of its own: Serve cancels the calls of a request whose client disconnects.
            self._waking = self._loop.create_task(self._call_until_ready(), context=contextvars.Context())

    async def _call_until_ready(self) -> None:
        """Keep one call pending while requests wait and no replica is connected."""
        assert self._links is not None
        while self._waiting and not self._links.ready:
            with contextlib.suppress(Exception):
                await self._wake()
            await asyncio.sleep(WAKE_INTERVAL_S)
