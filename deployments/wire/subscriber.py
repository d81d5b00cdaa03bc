"""KVEventSubscriber: hears every engine replica on behalf of one ingress, and tells a listener.

One thread polls one socket a replica and takes a bounded number of messages from each in turn, so that none of them
keeps the others waiting. What a message means is the business of the replica's feed; what cannot be a message of ours
is counted and dropped. Which replicas there are, and where, it is told.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import zmq

from deployments.observability.ingress_metrics import KV_INDEX_DROPPED, KV_INDEX_LAG
from deployments.wire.feed import Listener, ReplicaFeed
from deployments.wire.messages import (
    KVMessageError,
    Topics,
    decode_awaited,
    decode_events,
    decode_load,
    decode_snapshot,
)
from deployments.wire.sockets import Wakeup, check_endpoint, connect_subscriber
from engine.errors import ConfigError
from engine.observability.metrics import MetricSink

__all__ = ["KVEventSubscriber", "Listener"]

logger = logging.getLogger("ray.serve")

MAX_MESSAGES_A_TURN = 64  # of one replica
MAX_TICK_S = 0.05
MAX_SOCKETS = 4096  # replicas
CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, eq=False)
class _Target:
    """A replica as it was listed. Another listing is another target, though name and endpoint be the same."""

    replica: str
    endpoint: str
    topics: Topics


class _Link:
    """The socket and the feed of one target."""

    def __init__(self, target: _Target, made: zmq.Socket[bytes], feed: ReplicaFeed, renew_at: float) -> None:
        self.target = target
        self.socket = made
        self.feed = feed
        self.renew_at = renew_at  # if the replica is silent then, another socket is tried
        self.has_complained = False
        self._nonce: str | None = None  # of the snapshot's topic that the socket is subscribed to
        made.subscribe(target.topics.events)
        made.subscribe(target.topics.awaited)
        made.subscribe(target.topics.load)
        self.follow_nonce()

    def follow_nonce(self) -> None:
        """Ask for the snapshot that the feed wants now, and no longer for the one before."""
        if self._nonce == self.feed.nonce:
            return
        if self._nonce is not None:
            self.socket.unsubscribe(self.target.topics.snapshot(self._nonce))
        self._nonce = self.feed.nonce
        if self._nonce is not None:
            self.socket.subscribe(self.target.topics.snapshot(self._nonce))

    def receive(self, sink: MetricSink) -> bool:
        """Give the feed one message, if there is one; raises KVMessageError if it is none of ours."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if len(frames) != 2:
            raise KVMessageError(f"a message has {len(frames)} parts instead of 2")
        self._dispatch(frames[0], frames[1], sink)
        return True

    def _dispatch(self, topic: bytes, data: bytes, sink: MetricSink) -> None:
        topics, now = self.target.topics, time.monotonic()
        if topic == topics.events:
            events = decode_events(data)
            sink.observe(KV_INDEX_LAG, max(0.0, time.time() - events.sent_at))
            self.feed.events(events, now)
        elif topic == topics.awaited:
            self.feed.awaited(decode_awaited(data), now)
        elif topic == topics.load:
            self.feed.load(decode_load(data), now)
        elif self._nonce is not None and topic == topics.snapshot(self._nonce):
            self.feed.snapshot(self._nonce, decode_snapshot(data), now)
        elif not topics.is_snapshot(topic):  # a snapshot that was given up may still come
            raise KVMessageError(f"nobody subscribed to {topic[:40]!r}")


class KVEventSubscriber:
    """Listens to the replicas that it is told of.

    Args:
        listener: told what is heard, from the subscriber's thread; what it raises is logged.
        silence_s: a replica that says nothing for so long is lost until it speaks again.
        resync_s: a snapshot that does not come within so long is asked for again.
        renew_s: after so long without success another socket is tried: ZeroMQ connects again to who went away, but
            never to who has once broken its protocol.
    """

    def __init__(
        self,
        listener: Listener,
        sink: MetricSink,
        *,
        silence_s: float = 2.0,
        resync_s: float = 1.0,
        renew_s: float = 5.0,
    ) -> None:
        if silence_s <= 0 or resync_s <= 0 or renew_s <= 0:
            raise ConfigError(f"silence_s={silence_s}, resync_s={resync_s} and renew_s={renew_s} must be positive")
        self._listener = listener
        self._sink = sink
        self._silence_s = silence_s
        self._resync_s = resync_s
        self._renew_s = renew_s
        self._tick_s = min(MAX_TICK_S, silence_s / 4, resync_s / 4)
        self._next_tick = 0.0
        self._targets: dict[str, _Target] = {}  # replaced as a whole, never changed
        self._targets_lock = threading.Lock()
        self._refused: set[tuple[str, str]] = set()
        self._links: dict[zmq.Socket[bytes], _Link] = {}
        self._joined: dict[str, _Target] = {}  # what the links were made for
        self._is_closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._poller = zmq.Poller()
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="kv-subscriber", daemon=True)
        self._thread.start()

    def set_endpoints(self, endpoints: Mapping[str, str]) -> None:
        """Listen to these replicas (name -> endpoint) and to no others; any thread may call it.

        The listener hears nothing of a replica that is gone once this returns, but for a message that it is just being
        told. One that comes again joins anew. An endpoint that is none is logged, counted and left out.
        """
        with self._targets_lock:
            self._refused &= set(endpoints.items())
            targets: dict[str, _Target] = {}
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

    def _target(self, replica: str, endpoint: str) -> _Target | None:
        try:
            check_endpoint(endpoint)
            return _Target(replica, endpoint, Topics(replica))
        except ConfigError as error:
            if (replica, endpoint) not in self._refused:  # the same list comes again and again
                self._refused.add((replica, endpoint))
                self._sink.increment(KV_INDEX_DROPPED, reason="malformed")
                logger.warning("KV events of a replica are not listened to: %s", error)
            return None

    # --- the subscriber's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        self._poller.register(self._wakeup.reader, zmq.POLLIN)
        try:
            while not self._is_closed:
                idle_ms = math.ceil(1000 * self._tick_s) if self._links else None
                self._turn([one for one, _ in self._poller.poll(idle_ms)])
        except Exception:
            logger.exception("the KV subscriber has ended; this ingress will route without events")
            for link in self._links.values():
                self._listener.lost(link.target.replica)
        finally:
            self._is_closed = True
            for link in self._links.values():
                link.socket.close(0)
            self._wakeup.close()
            self._context.term()

    def _turn(self, ready: list[zmq.Socket[bytes]]) -> None:
        self._wakeup.clear()
        self._follow_targets()
        for one in ready:
            if one in self._links:
                self._receive(self._links[one])
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + self._tick_s
            for link in list(self._links.values()):
                self._tick(link, now)

    def _follow_targets(self) -> None:
        targets = self._targets
        if targets is self._joined:
            return
        for link in [one for one in self._links.values() if targets.get(one.target.replica) is not one.target]:
            self._leave(link)
        for target in targets.values():
            if self._joined.get(target.replica) is not target:
                self._join(target)
        self._joined = targets

    def _join(self, target: _Target) -> None:
        feed = ReplicaFeed(
            target.replica,
            self._listener,
            self._sink,
            now=time.monotonic(),
            silence_s=self._silence_s,
            resync_s=self._resync_s,
        )
        self._connect(target, feed)

    def _connect(self, target: _Target, feed: ReplicaFeed) -> None:
        try:
            made = connect_subscriber(self._context, target.endpoint)
        except zmq.ZMQError:
            logger.exception("cannot listen to replica %s at %s", target.replica, target.endpoint)
            return
        self._links[made] = _Link(target, made, feed, time.monotonic() + self._renew_s)
        self._poller.register(made, zmq.POLLIN)

    def _leave(self, link: _Link) -> None:
        del self._links[link.socket]
        self._poller.unregister(link.socket)
        link.socket.close(0)

    def _receive(self, link: _Link) -> None:
        for _ in range(MAX_MESSAGES_A_TURN):
            if not self._is_listed(link):
                return
            try:
                if not link.receive(self._sink):
                    return
            except KVMessageError as error:
                self._drop(link, error)
            except Exception:
                logger.exception("what replica %s has told could not be applied", link.target.replica)
                link.feed.distrust(time.monotonic())
            link.follow_nonce()

    def _tick(self, link: _Link, now: float) -> None:
        if not self._is_listed(link):
            return
        try:
            link.feed.tick(now)
        except Exception:
            logger.exception("the loss of replica %s could not be told", link.target.replica)
        link.follow_nonce()
        if link.feed.is_silent and now >= link.renew_at:
            self._leave(link)
            self._connect(link.target, link.feed)

    def _is_listed(self, link: _Link) -> bool:
        return self._targets.get(link.target.replica) is link.target and not self._is_closed

    def _drop(self, link: _Link, error: KVMessageError) -> None:
        self._sink.increment(KV_INDEX_DROPPED, reason=error.reason)
        if not link.has_complained:
            link.has_complained = True
            logger.warning("a message of replica %s is dropped: %s", link.target.replica, error)
