"""Subscription: the socket of one replica in a subscriber, and the feed that its messages go to.

On a gap the feed chooses a nonce, and the subscription adds the snapshot topic of that nonce.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import zmq

from deployments.observability.ingress_metrics import KV_INDEX_LAG
from deployments.transport.kv_events.codec import (
    KVMessageError,
    decode_awaited,
    decode_events,
    decode_load,
    decode_snapshot,
)
from deployments.transport.kv_events.feed import ReplicaFeed
from deployments.transport.kv_events.topics import Topics
from engine.observability.metrics import MetricSink

__all__ = ["Subscription", "Target"]


@dataclass(frozen=True, eq=False)
class Target:
    """A replica as it was listed. Compared by identity: a replica that is listed again is a new target."""

    replica: str
    endpoint: str
    topics: Topics


class Subscription:
    """The socket and the feed of one target.

    Args:
        target: the replica.
        socket: a SUB socket that is connected to it.
        feed: receives its messages.
        renew_at: if the replica is silent then, the subscriber replaces the socket.
    """

    def __init__(self, target: Target, socket: zmq.Socket[bytes], feed: ReplicaFeed, renew_at: float) -> None:
        self.target = target
        self.socket = socket
        self.feed = feed
        self.renew_at = renew_at
        self.has_logged_drop = False
        self._nonce: str | None = None  # of the snapshot topic that the socket is subscribed to
        socket.subscribe(target.topics.events)
        socket.subscribe(target.topics.awaited)
        socket.subscribe(target.topics.load)
        self.subscribe_to_snapshot()

    def subscribe_to_snapshot(self) -> None:
        """Subscribe to the snapshot that the feed waits for, if any, and to no other."""
        if self._nonce == self.feed.nonce:
            return
        if self._nonce is not None:
            self.socket.unsubscribe(self.target.topics.snapshot(self._nonce))
        self._nonce = self.feed.nonce
        if self._nonce is not None:
            self.socket.subscribe(self.target.topics.snapshot(self._nonce))

    def receive(self, sink: MetricSink, now: float) -> bool:
        """Pass one message, which arrives ``now``, to the feed; return False if there is none.

        Raises:
            KVMessageError: the message is not one that a publisher sends.
        """
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if len(frames) != 2:
            raise KVMessageError(f"a message has {len(frames)} parts instead of 2")
        self._dispatch(frames[0], frames[1], sink, now)
        return True

    def _dispatch(self, topic: bytes, data: bytes, sink: MetricSink, now: float) -> None:
        topics = self.target.topics
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
        elif not topics.is_snapshot(topic):  # a snapshot under an earlier nonce may still arrive
            raise KVMessageError(f"no subscription to topic {topic[:40]!r}")
