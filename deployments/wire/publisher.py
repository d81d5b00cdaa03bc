"""KVEventPublisher: tells every ingress what one engine has cached and how busy it is, and never delays the engine.

The engine's thread puts a batch into a queue and rings; a thread of the publisher's own sends it on an XPUB socket,
beside the load and, to whoever subscribes to a snapshot's topic, what is cached altogether. All of it goes through one
pipe a subscriber, in order, so a snapshot and the batches behind it fit without a hole. Who does not keep up loses
messages, notices by their numbers, and asks for another snapshot. What listens, and where, it does not know.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence

import zmq

from deployments.wire.messages import (
    MAX_MESSAGE_BYTES,
    MAX_RUNS,
    MAX_SNAPSHOT_BYTES,
    AwaitedMessage,
    Topics,
    encode,
    events_message,
    load_message,
    pack_hashes,
)
from deployments.wire.mirror import KVMirror
from deployments.wire.sockets import Wakeup, bind_publisher
from engine.errors import ConfigError
from engine.kv.events import KVEventBatch
from engine.observability.load import EngineLoad

__all__ = ["KVEventPublisher"]

logger = logging.getLogger("ray.serve")

MAX_BATCHES_A_TURN = 256
MAX_AWAITED = 1024  # announcements that wait to be sent; then the oldest are forgotten, and events will tell
MAX_SUBSCRIPTIONS_A_TURN = 64
MAX_SNAPSHOTS_A_TURN = 16
MAX_ASKED = 1024  # requests for snapshots that wait; who is not among them asks again
REST_FACTOR = 10  # building snapshots takes at most one part in so many of the time, whoever asks how often
SUBSCRIBE = b"\1"
CLOSE_TIMEOUT_S = 5.0


class KVEventPublisher:
    """Publishes one engine's KV events and load.

    Args:
        replica: the replica's name, which its topics carry.
        host: the node's own address, to which the socket binds.
        heartbeat_s: the last load is sent again after so long.
        max_queued: messages that wait for one slow subscriber; what comes then is lost to it.
        max_backlog: batches that wait for the publisher's thread; then the oldest are lost to all.

    Raises:
        ConfigError: ``host`` is not one address of this node, or ``replica`` is no name.
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
        self._has_new_load = True  # the first heartbeat goes out at once
        self._load_due = 0.0
        self._mirror = KVMirror()
        self._asked: dict[bytes, None] = {}  # topics of snapshots, the oldest first
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
        """Tell what a step changed. Takes microseconds and never blocks."""
        self._batches.append((batch, time.time()))
        self._wakeup.ring()

    def publish_awaited(self, hashes: Sequence[int]) -> None:
        """Announce the blocks of a prompt that joins the queue, so that equal ones come here whoever sends them."""
        self._awaited.append(pack_hashes(hashes))
        self._wakeup.ring()

    def publish_load(self, load: EngineLoad) -> None:
        """Tell how busy the engine is. Takes microseconds and never blocks; of several at once the last one is sent."""
        self._load = load
        self._has_new_load = True
        self._wakeup.ring()

    def close(self) -> None:
        """End the thread and close the socket; what is published afterwards goes nowhere."""
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
                ready = {one for one, _ in poller.poll(self._idle_ms())}
                self._turn(has_subscriptions=self._socket in ready)
        except Exception:
            logger.exception("the KV publisher has ended; ingresses will route without this replica's events")
        finally:
            self._is_closed = True
            self._socket.close(0)
            self._wakeup.close()
            self._context.term()

    def _idle_ms(self) -> int:
        if self._batches or self._awaited or self._has_new_load:
            return 0
        due = min(self._load_due, self._rest_until) if self._asked else self._load_due
        return max(0, math.ceil(1000 * (due - time.monotonic())))

    def _turn(self, *, has_subscriptions: bool) -> None:
        self._wakeup.clear()
        self._send_awaited()  # before the load that counts them
        self._send_events()
        self._send_load()
        if has_subscriptions:
            self._take_subscriptions()
        if self._asked and time.monotonic() >= self._rest_until:
            self._send_snapshots()

    def _send_awaited(self) -> None:
        for _ in range(len(self._awaited)):
            data = encode(AwaitedMessage(self._awaited.popleft()))
            if len(data) <= MAX_MESSAGE_BYTES:
                self._send(self._topics.awaited, data)

    def _send_events(self) -> None:
        for _ in range(min(len(self._batches), MAX_BATCHES_A_TURN)):
            batch, published_at = self._batches.popleft()
            try:
                message = events_message(batch, published_at)
            except Exception:  # a bug; like any batch that is lost, the next one shows that it is missing
                logger.exception("batch %d of KV events cannot be sent", batch.number)
                continue
            self._mirror.apply(message)
            data = encode(message)
            if len(data) <= MAX_MESSAGE_BYTES and len(message.runs) <= MAX_RUNS:  # else it is a gap, and a snapshot
                self._send(self._topics.events, data)

    def _send_load(self) -> None:
        now = time.monotonic()
        if not self._has_new_load and now < self._load_due:
            return
        self._has_new_load = False  # before the load is read: one that comes in between is sent again
        self._load_due = now + self._heartbeat_s
        self._send(self._topics.load, encode(load_message(self._mirror.generation, self._mirror.number, self._load)))

    def _take_subscriptions(self) -> None:
        for _ in range(MAX_SUBSCRIPTIONS_A_TURN):
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            verb, topic = data[:1], data[1:]
            if verb != SUBSCRIBE:
                self._asked.pop(topic, None)
            elif len(self._asked) < MAX_ASKED and self._topics.is_snapshot(topic):
                self._asked[topic] = None

    def _send_snapshots(self) -> None:
        began = time.monotonic()
        is_new = not self._mirror.has_snapshot
        data = self._mirror.snapshot()
        frame = zmq.Frame(data, copy=True)  # once, however many it is sent to
        for topic in list(self._asked)[:MAX_SNAPSHOTS_A_TURN]:
            del self._asked[topic]
            if len(data) <= MAX_SNAPSHOT_BYTES:
                self._send(topic, frame)
        if is_new:
            now = time.monotonic()
            self._rest_until = now + REST_FACTOR * (now - began)

    def _send(self, topic: bytes, data: bytes | zmq.Frame) -> None:
        """Send to all who subscribed to ``topic``; those who do not keep up miss it, so it never blocks."""
        self._socket.send(topic, zmq.NOBLOCK | zmq.SNDMORE)
        self._socket.send(data, zmq.NOBLOCK, copy=isinstance(data, bytes))
