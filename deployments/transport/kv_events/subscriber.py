"""KVEventSubscriber: receives the KV events and load reports of all replicas for one ingress.

One thread polls one socket per replica. It takes a bounded number of messages from each in turn, so that no replica
delays the others. A replica's feed interprets its messages and calls the listener; messages that cannot be decoded are
counted and dropped. Gaps are the feed's matter (feed.py); the subscriber only replaces the socket of a replica that
stays silent. ``set_endpoints`` says which replicas there are.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

import zmq

from deployments.observability.ingress_metrics import KV_INDEX_DROPPED
from deployments.transport.kv_events.codec import KVMessageError
from deployments.transport.kv_events.feed import Listener, ReplicaFeed
from deployments.transport.kv_events.sockets import Wakeup, check_endpoint, connect_subscriber
from deployments.transport.kv_events.subscription import Subscription, Target
from deployments.transport.kv_events.topics import Topics
from engine.errors import ConfigError
from engine.observability.metrics import MetricSink

__all__ = ["KVEventSubscriber", "Listener"]

logger = logging.getLogger("ray.serve")

MAX_MESSAGES_PER_TURN = 64  # of one replica
MIN_TURN_S = 0.005  # a thread that woke for each message would take the interpreter's lock from the event loop
MAX_TICK_S = 0.05
MAX_SOCKETS = 4096  # replicas
CLOSE_TIMEOUT_S = 5.0


class KVEventSubscriber:
    """Subscribes to the replicas passed to ``set_endpoints``.

    Args:
        listener: called from the subscriber's thread; an exception that it raises is logged, and the feed resyncs.
        sink: where metrics are reported.
        silence_s: the events of a replica count as lost after this many seconds without a message, until the next one.
        resync_s: a snapshot that does not arrive within this many seconds is requested again.
        renew_s: the socket of a replica that is silent for so long is replaced: ZeroMQ reconnects to a peer that was
            gone, but never to one that has violated its protocol.
        clock: returns seconds.
    """

    def __init__(
        self,
        listener: Listener,
        sink: MetricSink,
        *,
        silence_s: float = 2.0,
        resync_s: float = 1.0,
        renew_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if silence_s <= 0 or resync_s <= 0 or renew_s <= 0:
            raise ConfigError(f"silence_s={silence_s}, resync_s={resync_s} and renew_s={renew_s} must be positive")
        self._listener = listener
        self._sink = sink
        self._silence_s = silence_s
        self._resync_s = resync_s
        self._renew_s = renew_s
        self._clock = clock
        self._tick_s = min(MAX_TICK_S, silence_s / 4, resync_s / 4)
        self._next_tick = 0.0
        self._targets: dict[str, Target] = {}  # never modified, only replaced
        self._targets_lock = threading.Lock()
        self._rejected: set[tuple[str, str]] = set()
        self._subscriptions: dict[zmq.Socket[bytes], Subscription] = {}
        self._joined: dict[str, Target] = {}  # the targets that have subscriptions
        self._is_closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._poller = zmq.Poller()
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="kv-subscriber", daemon=True)
        self._thread.start()

    def set_endpoints(self, endpoints: Mapping[str, str]) -> None:
        """Replace the set of replicas (name -> endpoint); any thread may call it.

        Afterwards the listener is not called for a removed replica any more, except for a message that is being
        applied. A replica that is added again gets a new feed. An invalid endpoint is logged, counted and ignored.
        """
        with self._targets_lock:
            self._rejected &= set(endpoints.items())
            targets: dict[str, Target] = {}
            for replica, endpoint in endpoints.items():
                before = self._targets.get(replica)
                target = before if before and before.endpoint == endpoint else self._target(replica, endpoint)
                if target is not None:
                    targets[replica] = target
            self._targets = targets
        self._wakeup.ring()

    def close(self) -> None:
        """End the thread and close the sockets."""
        self._is_closed = True
        self._wakeup.ring()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _target(self, replica: str, endpoint: str) -> Target | None:
        try:
            check_endpoint(endpoint)
            return Target(replica, endpoint, Topics(replica))
        except ConfigError as error:
            if (replica, endpoint) not in self._rejected:  # logged once, since the list is repeated
                self._rejected.add((replica, endpoint))
                self._sink.increment(KV_INDEX_DROPPED, reason="malformed")
                logger.warning("no subscription to the KV events of a replica: %s", error)
            return None

    # --- the subscriber's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        self._poller.register(self._wakeup.reader, zmq.POLLIN)
        try:
            while not self._is_closed:
                timeout_ms = math.ceil(1000 * self._tick_s) if self._subscriptions else None
                self._run_once([socket for socket, _ in self._poller.poll(timeout_ms)])
                time.sleep(MIN_TURN_S)
        except Exception:
            logger.exception("the KV subscriber has ended; this ingress will route without events")
            for subscription in self._subscriptions.values():
                self._listener.events_lost(subscription.target.replica)
        finally:
            self._is_closed = True
            for subscription in self._subscriptions.values():
                subscription.socket.close(0)
            self._wakeup.close()
            self._context.term()

    def _run_once(self, ready: list[zmq.Socket[bytes]]) -> None:
        self._wakeup.clear()
        self._update_subscriptions()
        for socket in ready:
            if socket in self._subscriptions:
                self._receive(self._subscriptions[socket])
        now = self._clock()
        if now >= self._next_tick:
            self._next_tick = now + self._tick_s
            for subscription in list(self._subscriptions.values()):
                self._tick(subscription, now)

    def _update_subscriptions(self) -> None:
        targets = self._targets
        if targets is self._joined:
            return
        for subscription in list(self._subscriptions.values()):
            if targets.get(subscription.target.replica) is not subscription.target:
                self._leave(subscription)
        for target in targets.values():
            if self._joined.get(target.replica) is not target:
                self._join(target)
        self._joined = targets

    def _join(self, target: Target) -> None:
        feed = ReplicaFeed(
            target.replica,
            self._listener,
            self._sink,
            now=self._clock(),
            silence_s=self._silence_s,
            resync_s=self._resync_s,
        )
        self._connect(target, feed)

    def _connect(self, target: Target, feed: ReplicaFeed) -> None:
        try:
            socket = connect_subscriber(self._context, target.endpoint)
        except zmq.ZMQError:
            logger.exception("cannot connect to replica %s at %s", target.replica, target.endpoint)
            return
        self._subscriptions[socket] = Subscription(target, socket, feed, self._clock() + self._renew_s)
        self._poller.register(socket, zmq.POLLIN)

    def _leave(self, subscription: Subscription) -> None:
        del self._subscriptions[subscription.socket]
        self._poller.unregister(subscription.socket)
        subscription.socket.close(0)

    def _receive(self, subscription: Subscription) -> None:
        for _ in range(MAX_MESSAGES_PER_TURN):
            if not self._is_listed(subscription):
                return
            try:
                if not subscription.receive(self._sink, self._clock()):
                    return
            except KVMessageError as error:
                self._drop(subscription, error)
            except Exception:
                logger.exception("a message of replica %s could not be applied", subscription.target.replica)
                subscription.feed.restart(self._clock())
            subscription.subscribe_to_snapshot()

    def _tick(self, subscription: Subscription, now: float) -> None:
        if not self._is_listed(subscription):
            return
        try:
            subscription.feed.tick(now)
        except Exception:
            logger.exception("the loss of replica %s could not be reported", subscription.target.replica)
        subscription.subscribe_to_snapshot()
        if subscription.feed.is_silent and now >= subscription.renew_at:
            self._leave(subscription)
            self._connect(subscription.target, subscription.feed)

    def _is_listed(self, subscription: Subscription) -> bool:
        return self._targets.get(subscription.target.replica) is subscription.target and not self._is_closed

    def _drop(self, subscription: Subscription, error: KVMessageError) -> None:
        self._sink.increment(KV_INDEX_DROPPED, reason=error.reason)
        if not subscription.has_logged_drop:
            subscription.has_logged_drop = True
            logger.warning("a message of replica %s is dropped: %s", subscription.target.replica, error)
