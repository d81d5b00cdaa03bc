"""KVEventPublisher: publishes one engine's KV events and load to every ingress, without delaying the engine.

The engine's thread appends a batch to a queue and wakes the publisher's thread, which sends it on an XPUB socket,
together with load reports and, to a subscriber of a snapshot topic, a snapshot of everything cached. ZeroMQ keeps the
order per subscriber, so the batches after a snapshot continue it without a gap.

A gap arises when a subscriber is too slow and its queue drops messages, when the engine is too fast and the backlog
drops batches, or when a batch exceeds the size limits. The subscriber detects it by the numbers and subscribes to
another snapshot. The publisher does not know its subscribers.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence

import zmq

from deployments.transport.hashes import pack_hashes
from deployments.transport.kv_events.codec import MAX_MESSAGE_BYTES, encode
from deployments.transport.kv_events.messages import (
    MAX_EVENT_GROUPS,
    MAX_SNAPSHOT_BYTES,
    AwaitedMessage,
    LoadMessage,
    events_message,
)
from deployments.transport.kv_events.mirror import KVMirror
from deployments.transport.kv_events.sockets import Wakeup, bind_publisher
from deployments.transport.kv_events.topics import Topics
from engine.errors import ConfigError
from engine.kv.events import KVEventBatch
from engine.observability.load import EngineLoad

__all__ = ["KVEventPublisher"]

logger = logging.getLogger("ray.serve")

MIN_TURN_S = 0.005  # a thread that woke for each step would take the interpreter's lock from the step thread
MAX_BATCHES_PER_TURN = 256
MAX_AWAITED = 1024  # queued announcements; older ones are dropped, events replace them
MAX_SUBSCRIPTIONS_PER_TURN = 64
MAX_SNAPSHOTS_PER_TURN = 16
MAX_REQUESTED = 1024  # pending snapshot requests; a subscriber whose request is dropped repeats it
REST_FACTOR = 10  # encoding snapshots takes at most 1/10 of the time, however many are requested
SUBSCRIBE = b"\1"
CLOSE_TIMEOUT_S = 5.0


class KVEventPublisher:
    """Publishes one engine's KV events and load.

    Args:
        replica: the replica's name, part of its topics.
        host: the node's own address, to which the socket binds.
        heartbeat_s: an unchanged load is sent again after this many seconds.
        max_queued: messages queued for one slow subscriber; further ones are dropped for it.
        max_backlog: batches queued for the publisher's thread; further ones displace the oldest.

    Raises:
        ConfigError: ``host`` is not an address of this node, or ``replica`` is not a valid name.
    """

    def __init__(
        self, replica: str, host: str, *, heartbeat_s: float = 0.1, max_queued: int = 1024, max_backlog: int = 16384
    ) -> None:
        if heartbeat_s <= 0 or max_queued < 1 or max_backlog < 1:
            raise ConfigError(
                f"heartbeat_s={heartbeat_s}, max_queued={max_queued} and max_backlog={max_backlog} must be positive"
            )
        self._topics = Topics(replica)
        self._heartbeat_s = heartbeat_s
        self._batches: deque[tuple[KVEventBatch, float]] = deque(maxlen=max_backlog)
        self._awaited: deque[bytes] = deque(maxlen=MAX_AWAITED)
        self._load: EngineLoad | None = None
        self._has_new_load = True  # so that the first heartbeat is sent at once
        self._next_load_at = 0.0
        self._mirror = KVMirror()
        self._requested: dict[bytes, None] = {}  # topics of pending snapshot requests, the oldest first
        self._rest_until = 0.0
        self._is_closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket, self.endpoint = bind_publisher(self._context, host, max_queued)
        except ConfigError:
            self._context.term()
            raise
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="kv-publisher", daemon=True)
        self._thread.start()

    def publish_events(self, batch: KVEventBatch) -> None:
        """Queue the changes of a step. Takes microseconds and never blocks."""
        self._batches.append((batch, time.time()))
        self._wakeup.ring()

    def publish_awaited(self, hashes: Sequence[int]) -> None:
        """Announce the blocks of a prompt that joins the queue, so that all ingresses send equal prompts here."""
        self._awaited.append(pack_hashes(hashes))
        self._wakeup.ring()

    def publish_load(self, load: EngineLoad) -> None:
        """Queue a load report, which replaces an unsent one. Takes microseconds and never blocks."""
        self._load = load
        self._has_new_load = True
        self._wakeup.ring()

    def close(self) -> None:
        """End the thread and close the socket; publishing has no effect afterwards."""
        self._is_closed = True
        self._wakeup.ring()
        self._thread.join(CLOSE_TIMEOUT_S)

    # --- the publisher's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup.reader, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        try:
            while not self._is_closed:
                ready = {polled for polled, _ in poller.poll(self._poll_timeout_ms())}
                self._run_once(has_subscriptions=self._socket in ready)
                time.sleep(MIN_TURN_S)
        except Exception:
            logger.exception("the KV publisher has ended; ingresses will route without this replica's events")
        finally:
            self._is_closed = True
            self._socket.close(0)
            self._wakeup.close()
            self._context.term()

    def _poll_timeout_ms(self) -> int:
        if self._batches or self._awaited or self._has_new_load:
            return 0
        wake_at = min(self._next_load_at, self._rest_until) if self._requested else self._next_load_at
        return max(0, math.ceil(1000 * (wake_at - time.monotonic())))

    def _run_once(self, *, has_subscriptions: bool) -> None:
        self._wakeup.clear()
        self._send_awaited()  # before the load that counts them
        self._send_events()
        self._send_load()
        if has_subscriptions:
            self._receive_subscriptions()
        if self._requested and time.monotonic() >= self._rest_until:
            self._send_snapshots()

    def _send_awaited(self) -> None:
        for _ in range(len(self._awaited)):
            data = encode(AwaitedMessage(self._awaited.popleft()))
            if len(data) <= MAX_MESSAGE_BYTES:
                self._send(self._topics.awaited, data)

    def _send_events(self) -> None:
        for _ in range(min(len(self._batches), MAX_BATCHES_PER_TURN)):
            batch, published_at = self._batches.popleft()
            try:
                message = events_message(batch, published_at)
            except Exception:  # a bug; the batch is a gap, which the number of the next one shows
                logger.exception("batch %d of KV events cannot be sent", batch.number)
                continue
            self._mirror.apply(message)
            data = encode(message)
            if len(data) <= MAX_MESSAGE_BYTES and len(message.groups) <= MAX_EVENT_GROUPS:  # else it is a gap
                self._send(self._topics.events, data)

    def _send_load(self) -> None:
        now = time.monotonic()
        if not self._has_new_load and now < self._next_load_at:
            return
        self._has_new_load = False  # before the load is read, so that a newer one is sent again
        self._next_load_at = now + self._heartbeat_s
        self._send(self._topics.load, encode(LoadMessage(self._mirror.run_id, self._mirror.number, self._load)))

    def _receive_subscriptions(self) -> None:
        for _ in range(MAX_SUBSCRIPTIONS_PER_TURN):
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            verb, topic = data[:1], data[1:]
            if verb != SUBSCRIBE:
                self._requested.pop(topic, None)
            elif len(self._requested) < MAX_REQUESTED and self._topics.is_snapshot(topic):
                self._requested[topic] = None

    def _send_snapshots(self) -> None:
        began = time.monotonic()
        is_new = not self._mirror.has_snapshot
        data = self._mirror.snapshot()
        frame = zmq.Frame(data, copy=True)  # copied once for all subscribers
        for topic in list(self._requested)[:MAX_SNAPSHOTS_PER_TURN]:
            del self._requested[topic]
            if len(data) <= MAX_SNAPSHOT_BYTES:
                self._send(topic, frame)
        if is_new:
            now = time.monotonic()
            self._rest_until = now + REST_FACTOR * (now - began)

    def _send(self, topic: bytes, data: bytes | zmq.Frame) -> None:
        """Send to all subscribers of ``topic``. Never blocks: a subscriber whose queue is full misses it."""
        self._socket.send(topic, zmq.NOBLOCK | zmq.SNDMORE)
        self._socket.send(data, zmq.NOBLOCK, copy=isinstance(data, bytes))
