"""ReplicaConnection: the numbered messages between an ingress and one replica, over sockets that break.

    connecting --- Status ---> ready
    ready --- connection lost, the replica still listens ---> ready: ZeroMQ reconnects, and what was lost is sent again
    ready --- nothing listens, or the replica reports an error ---> lost; the next tick starts another connection

It says Hello, acknowledges outputs, sends again what was lost, and finds out whether the replica is alive. It does not
know what a stream is: outputs go to ``on_outputs``. It uses one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

import zmq

from deployments.observability.ingress_metrics import CHANNEL_GAPS, CHANNEL_RECONNECTIONS, ingress_recorder
from deployments.transport.kv_events.sockets import check_endpoint
from deployments.transport.request_channel.address import ReplicaAddress
from deployments.transport.request_channel.codec import ChannelMessageError, decode_from_replica, encode
from deployments.transport.request_channel.messages import Hello, Outputs, Status
from deployments.transport.request_channel.numbering import Arrivals, Outbox
from deployments.transport.request_channel.sockets import Socket, SocketReader, connect_dealer, watch_connection

__all__ = ["ReplicaConnection"]

logger = logging.getLogger("ray.serve")

MAX_KEPT_BYTES = 64 * 2**20  # of requests that the replica has not acknowledged; beyond it no more are sent
MAX_UNACKNOWLEDGED_BYTES = 8 * 2**20  # of outputs; beyond it they are acknowledged before the next tick
PROBE_TIMEOUT_S = 1.0
IDENTITY_BYTES = 16


class ReplicaConnection:
    """The connection to one replica.

    Args:
        address: where the replica is.
        context: of the sockets.
        on_ready: called when messages may be sent that could not be sent before.
        on_outputs: called with each Outputs, in order.
        on_lost: called when the replica is lost, with the reason and whether the connection was ready.

    Attributes:
        is_ready: the replica has answered and was not lost since.
        is_lost: the replica was lost and has not answered since.

    Raises:
        ConfigError: the address has an invalid endpoint.
    """

    def __init__(
        self,
        address: ReplicaAddress,
        context: zmq.Context[Socket],
        *,
        on_ready: Callable[[], None],
        on_outputs: Callable[[Outputs], None],
        on_lost: Callable[[str, bool], None],
    ) -> None:
        self._address = address
        self._context = context
        self._on_ready = on_ready
        self._on_outputs = on_outputs
        self._on_lost = on_lost
        self._probe: asyncio.Task[None] | None = None
        self.is_lost = False
        for endpoint in (address.requests, address.outputs):  # before a socket is opened
            check_endpoint(endpoint)
        self._open()

    def _open(self) -> None:
        """Start a connection under a new identity, with new numbers."""
        identity = secrets.token_bytes(IDENTITY_BYTES)
        self.is_ready = False
        self._outbox, self._arrivals = Outbox(), Arrivals()
        self._is_connected = False
        self._num_broken = 0  # connections
        self._last_acknowledged = self._num_unacknowledged_bytes = 0  # of outputs
        self._unsent: list[bytes] = []  # messages of this turn of the event loop
        requests, request_events = connect_dealer(self._context, self._address.requests, identity)
        outputs, output_events = connect_dealer(self._context, self._address.outputs, identity)
        self._requests = SocketReader(requests, self._receive)
        self._sockets = [
            self._requests,
            SocketReader(outputs, self._receive),
            watch_connection(request_events, partial(self._connection_changed, of_requests=True)),
            watch_connection(output_events, partial(self._connection_changed, of_requests=False)),
        ]
        self._say_hello()

    # --- called by the link -------------------------------------------------------------------------------------------

    @property
    def next_number(self) -> int:
        """The number of the next message."""
        return self._outbox.last_number + 1

    @property
    def takes_requests(self) -> bool:
        """Whether requests may be sent."""
        return self.is_ready and self._outbox.num_bytes <= MAX_KEPT_BYTES

    @property
    def all_acknowledged(self) -> bool:
        """Whether the replica knows that all its outputs have arrived."""
        return self._last_acknowledged == self._arrivals.received

    def send_numbered(self, data: bytes) -> None:
        """Send the message with the next number, and keep it until the replica has acknowledged it."""
        self._outbox.add(data)
        self.send(data)

    def tick(self) -> None:
        """Keep the connection alive; acknowledge outputs. Called about every half second."""
        if self._requests.is_closed:  # the replica was lost; it may have been a false alarm
            self._open()
        elif self._is_connected:  # else ZeroMQ would keep every Hello
            self._say_hello()
        elif self.is_ready:  # it listened when its connection broke, and may have died before it could reconnect
            self._start_probe()

    def close(self) -> None:
        """Close the sockets."""
        self.is_ready = False
        if self._probe is not None:
            self._probe.cancel()
        self._close_sockets()

    # --- sending ------------------------------------------------------------------------------------------------------

    def _say_hello(self, *, resend: bool = False) -> None:
        self._last_acknowledged, self._num_unacknowledged_bytes = self._arrivals.received, 0
        outbox = self._outbox
        hello = Hello(self._address.secret, self._arrivals.received, outbox.acknowledged, outbox.last_number, resend)
        self.send(encode(hello))

    def send(self, data: bytes) -> None:
        """Send a message, once, with all others of this turn of the event loop, in their order.

        Each ZeroMQ message wakes ZeroMQ's thread, which takes the core from a burst's other requests.
        """
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(data)

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        if messages:  # else the connection is another one by now
            self._requests.send(*messages)

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _receive(self, frames: list[bytes]) -> None:
        try:
            message = decode_from_replica(frames[-1])
        except ChannelMessageError as error:
            self._lose(f"it sends something else: {error}")
            return
        if isinstance(message, Status):
            self._on_status(message)
            return
        had_gap = self._arrivals.has_gap
        if self._arrivals.accept(message.number):
            self._on_outputs(message)
            self._num_unacknowledged_bytes += len(frames[-1])
            if self._num_unacknowledged_bytes > MAX_UNACKNOWLEDGED_BYTES:
                self._say_hello()
        elif self._arrivals.has_gap and not had_gap:
            self._ask_for_lost_outputs()

    def _on_status(self, status: Status) -> None:
        if status.error is not None:
            self._lose(status.error)
            return
        self._outbox.acknowledge(status.received)
        if status.resend:
            ingress_recorder().increment(CHANNEL_GAPS, content="requests")
            for _, data in self._outbox.after(status.received):
                self.send(data)
        if self._arrivals.has_lost_tail(status.sent):
            self._ask_for_lost_outputs()
        self.is_ready, self.is_lost = True, False
        self._on_ready()

    def _ask_for_lost_outputs(self) -> None:
        ingress_recorder().increment(CHANNEL_GAPS, content="outputs")
        self._say_hello(resend=True)

    # --- whether the replica is alive ---------------------------------------------------------------------------------

    def _connection_changed(self, is_connected: bool, *, of_requests: bool) -> None:
        if of_requests:
            self._is_connected = is_connected
        if is_connected:
            self._say_hello(resend=True)
            if self._num_broken:
                self._num_broken -= 1
                ingress_recorder().increment(CHANNEL_RECONNECTIONS)
        else:
            self._num_broken += 1
            self._start_probe()

    def _start_probe(self) -> None:
        if self._probe is None or self._probe.done():
            self._probe = asyncio.get_running_loop().create_task(self._probe_replica())

    async def _probe_replica(self) -> None:
        """See whether the replica still listens; if not, it is lost."""
        address, requests = urlsplit(self._address.requests), self._requests
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(address.hostname, address.port)
        except OSError as error:  # TimeoutError is one
            if requests is self._requests:  # else another connection has been opened meanwhile
                self._lose(f"it does not listen: {type(error).__name__}")
        else:
            writer.close()

    def _lose(self, reason: str) -> None:
        """Close the connection; ``tick`` starts another."""
        if self._requests.is_closed:
            return
        was_ready, self.is_ready, self.is_lost = self.is_ready, False, True
        self._close_sockets()
        self._on_lost(reason, was_ready)

    def _close_sockets(self) -> None:
        for reader in self._sockets:
            reader.close()
