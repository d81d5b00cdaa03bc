"""Dispatcher: sends each request of an ingress to the replica that the view chooses.

A request that no replica takes now waits here: because there is none yet, or because all are full. Waiting requests
are sent in the order of their arrival. A replica that is full or shuts down returns a request, which then goes to
another one; the request's reader does not notice.

Requests of the lowest priority, those of batches, are held here as long as they would be felt by others
(background_gate.py). If others come, they are paused: aborted in the engine, and held with the tokens that they have.

It makes one attempt and reports how that ends; Generation retries and migrates. While a request waits and no replica is
connected, one call through Serve's handle is pending, which Serve's autoscaler counts as a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from math import inf
from time import monotonic, perf_counter
from typing import Any

from msgspec.structs import replace

from deployments.observability.ingress_metrics import (
    BATCH_PAUSES,
    ROUTING_DECISION_SECONDS,
    ROUTING_DECISIONS,
    ingress_recorder,
)
from deployments.requests.background_gate import BACKGROUND_PRIORITY, MAX_SLOWDOWN, BackgroundGate
from deployments.requests.hot_texts import HotTexts
from deployments.requests.replication import Replication
from deployments.requests.stall_watch import StallWatch
from deployments.routing.cluster_view import ClusterView
from deployments.transport.request_channel.dispatch import Dispatch
from deployments.transport.request_channel.errors import StreamPausedError
from deployments.transport.request_channel.links import Links
from engine.errors import RequestError
from engine.kv.tiers.copies import CopyOrder
from engine.request import EngineRequest

__all__ = ["Dispatcher"]

FULL_S = 0.1  # a replica that has returned a request is asked again after this many seconds
WAKE_INTERVAL_S = 0.5
BACKGROUND_INTERVAL_S = 0.1  # between two looks at what other ingresses and the engines have changed
BACKGROUND_PER_TURN = 8  # requests that are sent in one turn of the event loop


class Dispatcher:
    """Sends the requests of one ingress process to the engine replicas.

    Args:
        view: chooses replicas, and knows whether a queue explains that no token arrives.
        wake: calls any replica through Serve's handle; waits while there is none.
        max_requests: unfinished requests of this ingress at one replica.
        stall_timeout_s: seconds without an output after which a replica counts as lost.
        request_timeout_s: seconds that a request may take from its arrival to its last token; one of a batch, from
            when it is sent.
        max_background: requests of batches at one replica, at most.
        max_background_slowdown: ``max_slowdown`` of BackgroundGate.
        kv_replication: tokens of an answer after which a neighbour copies its KV; None: never.
    """

    def __init__(
        self,
        view: ClusterView,
        wake: Callable[[], Awaitable[object]],
        *,
        max_requests: int,
        stall_timeout_s: float,
        request_timeout_s: float,
        max_background: int = 64,
        max_background_slowdown: float = MAX_SLOWDOWN,
        kv_replication: int | None = None,
    ) -> None:
        self.request_timeout_s = request_timeout_s
        self._view = view
        self._wake = wake
        self._max_requests = max_requests
        self.replication = Replication(view, kv_replication, self._send_copy)
        self._hot_texts = HotTexts(view, self._send_copy)
        self._watch = StallWatch(view, stall_timeout_s=stall_timeout_s)
        self._waiting: dict[Dispatch, None] = {}  # the first to send first
        self._full_until: dict[str, float] = {}  # replica -> time of the event loop
        self._waking: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._links: Links | None = None
        self.background = BackgroundGate(view, max_background, monotonic, max_background_slowdown)
        self._held: dict[Dispatch, None] = {}  # of the background; the first to send first
        self._background_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Connect to the replicas in the view, now and whenever they change. Call it on the event loop of requests."""
        self._loop = asyncio.get_running_loop()
        self._links = Links(
            on_change=self._send_waiting,
            on_returned=self._take_back,
            on_left=self._replica_left,
            on_joined=self._hot_texts.replica_joined,
        )
        self._view.watch(self._links.set_replicas)

    def close(self) -> None:
        """Close the connections; unfinished requests fail."""
        if self._links is not None:
            self._view.watch(lambda metadata: None)
            self._links.close()
        if self._waking is not None:
            self._waking.cancel()
        for timer in (self._retry, self._background_timer):
            if timer is not None:
                timer.cancel()

    def send(
        self,
        request: EngineRequest,
        block_hashes: Sequence[int],
        *,
        avoid: Collection[str],
        deadline: float,
        handed_over_by: str = "",
    ) -> Dispatch:
        """Send a request, now or when a replica takes it. The caller passes the dispatch to ``end``, in any case.

        Args:
            request: the prompt, and the output tokens that other replicas have generated.
            block_hashes: of the full blocks of the prompt and of those output tokens.
            avoid: replicas that have just failed this request.
            deadline: when the request times out, on the event loop's clock.
            handed_over_by: the replica that has just ended this request, and still holds its KV.
        """
        dispatch = Dispatch(request, block_hashes, avoid, deadline, handed_over_by)
        if _is_background(dispatch):
            dispatch.deadline = inf  # until it is sent
            self._held[dispatch] = None
            self._send_held()
        elif self._waiting or not self._try_send(dispatch):
            self._waiting[dispatch] = None
            self._wake_replicas()
        self._watch.add(dispatch)
        return dispatch

    def copy(self, dispatch: Dispatch, hashes: Sequence[int], output: Sequence[int]) -> float:
        """Let a neighbour copy the KV of an unfinished answer: see ``Replication.copy``."""
        assert self._links is not None
        return self.replication.copy(dispatch, hashes, output, self._links.ready)

    def _replica_left(self, name: str, metadata: Mapping[str, Any]) -> None:
        assert self._links is not None
        self._hot_texts.replica_left(name, metadata, self._links.ready)

    def _send_copy(self, replica: str, order: CopyOrder) -> None:
        assert self._links is not None
        self._links[replica].copy(order)

    def end(self, dispatch: Dispatch) -> None:
        """End a dispatch; if it is unfinished, its replica aborts the request. Ending twice is harmless."""
        if dispatch.ended is not None:
            return
        dispatch.ended = monotonic()
        self._watch.remove(dispatch)
        self._waiting.pop(dispatch, None)
        self._held.pop(dispatch, None)
        if self._links is not None:
            self._links.cancel(dispatch)
        self._view.ended(dispatch)
        self.background.ended(dispatch)
        self._send_waiting()

    def queued(self) -> tuple[int, int]:
        """Return (waiting requests, queued prefill tokens) of all replicas, and the requests that wait here."""
        num_requests, num_tokens = self._view.queued()
        return num_requests + len(self._waiting), num_tokens

    # --- replicas -----------------------------------------------------------------------------------------------------

    def _try_send(self, dispatch: Dispatch) -> bool:
        """Send a request to the best replica that takes it; False if none does."""
        assert self._links is not None, "start() was not called"
        is_background = _is_background(dispatch)
        started = perf_counter()
        takes, links = self._takes_background if is_background else self._takes, self._links
        decision = self._view.choose(dispatch, links.names, takes, is_lost=links.is_lost) if links.names else None
        if decision is None:
            return False
        ingress_recorder().increment(ROUTING_DECISIONS, outcome=decision.outcome)
        ingress_recorder().observe(ROUTING_DECISION_SECONDS, perf_counter() - started)
        num_others = self._num_others(decision.replica)  # without this one, which is not counted below at first
        if (source := self._view.kv_source(decision)) != dispatch.request.kv_source:
            dispatch.request = replace(dispatch.request, kv_source=source)
        try:
            self._links[decision.replica].submit(dispatch)
        except RequestError as error:
            dispatch.fail(error)
        else:
            self._hot_texts.sent(dispatch, is_repeat=dispatch.sent_at < inf or bool(dispatch.avoid))
            self._view.sent(dispatch, decision)  # this sets ``sent_at``
            if is_background:
                dispatch.deadline = self._loop.time() + self.request_timeout_s
                self.background.sent(dispatch, num_others)
            else:
                dispatch.on_gap = self.background.gaps_of(dispatch.replica).add
                self._pause_excess(dispatch.replica)
        return True

    def _takes(self, replica: str) -> bool:
        """Whether a replica takes a request now."""
        assert self._links is not None
        if self._full_until and self._full_until.get(replica, 0.0) > self._loop.time():
            return False
        link = self._links[replica]
        return link.takes_requests and link.num_streams < self._max_requests

    def _takes_background(self, replica: str) -> bool:
        """Whether a replica takes a request of a batch now."""
        return self._takes(replica) and self.background.has_room(replica, self._num_others(replica))

    def _take_back(self, dispatch: Dispatch, error: Exception) -> None:
        """Let a request that its replica has not taken wait for another one, before all that came later."""
        del error
        now = self._loop.time()
        self._full_until = {name: until for name, until in self._full_until.items() if until > now}
        self._full_until[dispatch.replica] = now + FULL_S
        self._view.ended(dispatch)
        self.background.ended(dispatch)
        dispatch.replica = ""
        if _is_background(dispatch):
            dispatch.deadline = inf
            self._held = {dispatch: None} | self._held
            self._watch_background()
            return
        self._waiting = {dispatch: None} | self._waiting
        self._loop.call_soon(self._send_waiting)  # after the rest of the message: it may return more
        self._wake_replicas()

    def _send_waiting(self) -> None:
        """Send waiting requests while a replica takes them."""
        while self._waiting:
            dispatch = next(iter(self._waiting))
            if not self._try_send(dispatch):
                break
            self._waiting.pop(dispatch, None)
        if self._waiting and self._full_until and self._retry is None:
            self._retry = self._loop.call_later(FULL_S, self._send_again)
        self._send_held()

    def _send_again(self) -> None:
        self._retry = None
        self._send_waiting()

    # --- requests of batches ------------------------------------------------------------------------------------------

    def _num_others(self, replica: str) -> int:
        """Return the number of this ingress's requests at a replica that are not of batches."""
        assert self._links is not None
        return max(0, self._links[replica].num_streams - self.background.num_running(replica))

    def _send_held(self) -> None:
        """Send held requests while no other one waits, and a replica has room that others do not need."""
        if not self._held:
            return
        assert self._links is not None, "start() was not called"
        self._watch_background()
        if not self._links.ready:
            self._wake_replicas()
        for _ in range(BACKGROUND_PER_TURN):
            dispatch = next(iter(self._held), None)
            if dispatch is None or self._waiting or not self._try_send(dispatch):
                return
            self._held.pop(dispatch, None)
        self._loop.call_soon(self._send_held)

    def _pause_excess(self, replica: str) -> None:
        """Pause the requests of batches that others at a replica would feel."""
        assert self._links is not None
        for dispatch in self.background.excess(replica, self._num_others(replica)):
            self._links.cancel(dispatch)
            self.background.ended(dispatch)
            dispatch.fail(StreamPausedError(f"{dispatch.request.request_id} made room for other requests"))
            ingress_recorder().increment(BATCH_PAUSES)

    def _watch_background(self) -> None:
        if self._background_timer is None:
            self._background_timer = self._loop.call_later(BACKGROUND_INTERVAL_S, self._check_background)

    def _check_background(self) -> None:
        """Pause and send what the present load asks for."""
        assert self._links is not None
        self._background_timer = None
        for replica in self._links.ready:
            self._pause_excess(replica)
        self._send_held()
        if self._held or not self.background.is_idle:
            self._watch_background()

    # --- scaling from zero --------------------------------------------------------------------------------------------

    def _wake_replicas(self) -> None:
        if self._waking is None or self._waking.done():
            # In a context of its own: Serve cancels the calls of a request whose client disconnects.
            self._waking = self._loop.create_task(self._call_until_ready(), context=contextvars.Context())

    async def _call_until_ready(self) -> None:
        """Keep one call pending while requests wait and no replica is connected."""
        assert self._links is not None
        while (self._waiting or self._held) and not self._links.ready:
            with contextlib.suppress(Exception):
                await self._wake()
            await asyncio.sleep(WAKE_INTERVAL_S)


def _is_background(dispatch: Dispatch) -> bool:
    return dispatch.request.priority == BACKGROUND_PRIORITY
