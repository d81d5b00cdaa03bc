"""Link: one replica as an ingress sees it: requests to it, their streams, and whether it is alive.

    connecting --- Status ---> ready: takes requests
    ready --- connection lost, the replica still listens ---> ready: ZeroMQ reconnects, and what was lost is sent again
    ready --- nothing listens, or the replica reports an error ---> lost: every stream fails; then connecting again

It uses one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import zmq

from deployments.observability.ingress_metrics import (
    CHANNEL_GAPS,
    CHANNEL_LOST_REPLICAS,
    CHANNEL_RECONNECTIONS,
    STREAM_PAUSES,
    ingress_recorder,
)
from deployments.transport.kv_events.sockets import check_endpoint
from deployments.transport.request_channel.address import ReplicaAddress
from deployments.transport.request_channel.codec import (
    ChannelMessageError,
    decode_from_replica,
    encode,
    encode_request,
)
from deployments.transport.request_channel.errors import (
    ReplicaDrainingError,
    ReplicaFullError,
    StreamPausedError,
    error_of,
)
from deployments.transport.request_channel.messages import Abort, Hello, Outputs, Status
from deployments.transport.request_channel.numbering import Arrivals, Outbox
from deployments.transport.request_channel.sockets import (
    MAX_REQUEST_BYTES,
    Socket,
    SocketReader,
    connect_dealer,
    watch_connection,
)
from deployments.transport.request_channel.stream import ReplicaStream
from engine.errors import EngineDeadError, RequestError
from engine.request import EngineRequest

__all__ = ["Link"]

logger = logging.getLogger("ray.serve")

MAX_KEPT_BYTES = 64 * 2**20  # of requests that the replica has not acknowledged; beyond it the link takes no more
MAX_UNACKNOWLEDGED_BYTES = 8 * 2**20  # of outputs; after so many they are acknowledged before the next tick
PROBE_TIMEOUT_S = 1.0
MAX_STALLED_STATUSES = 4  # outputs that were sent and have not arrived after so many Statuses are lost
IDENTITY_BYTES = 16


class Link:
    """The connection to one replica.

    Args:
        replica: its name.
        address: where it is.
        context: of the sockets.
        on_change: called when the link may take requests that it did not take before.
        on_returned: called with a stream whose request the replica did not take, and its ReplicaFullError or
            ReplicaDrainingError.

    Raises:
        ConfigError: the address has an invalid endpoint.
    """

    def __init__(
        self,
        replica: str,
        address: ReplicaAddress,
        context: zmq.Context[Socket],
        *,
        on_change: Callable[[], None],
        on_returned: Callable[[ReplicaStream, Exception], None],
    ) -> None:
        self.replica = replica
        self.address = address
        self._context = context
        self._on_change = on_change
        self._on_returned = on_returned
        self._probe: asyncio.Task[None] | None = None
        self._sockets: list[SocketReader] = []
        for endpoint in (address.requests, address.outputs):  # before a socket is made
            check_endpoint(endpoint)
        self._open()

    def _open(self) -> None:
        """Start a connection under a new identity, with new numbers."""
        identity = secrets.token_bytes(IDENTITY_BYTES)
        self.is_ready = False
        self._outbox, self._arrivals = Outbox(), Arrivals()
        self._is_connected = False
        self._num_broken = 0  # connections
        self._received_at_last_status = self._num_stalled_statuses = 0
        self._last_acknowledged = self._num_unacknowledged_bytes = 0  # of outputs
        self._num_streams = 0  # so far
        self._streams: dict[int, ReplicaStream] = {}
        self._number_of: dict[ReplicaStream, int] = {}
        self._unsent: list[bytes] = []  # messages of this turn of the event loop
        requests, request_events = connect_dealer(self._context, self.address.requests, identity)
        outputs, output_events = connect_dealer(self._context, self.address.outputs, identity)
        self._requests = SocketReader(requests, self._receive)
        self._sockets = [
            self._requests,
            SocketReader(outputs, self._receive),
            watch_connection(request_events, self._on_requests_connection),
            watch_connection(output_events, self._on_connection),
        ]
        self._say_hello()

    # --- requests -------------------------------------------------------------------------------------------------

    @property
    def num_streams(self) -> int:
        """Number of unfinished streams."""
        return len(self._streams)

    @property
    def is_idle(self) -> bool:
        """Whether all streams have ended, and the replica knows that their outputs have arrived."""
        return not self._streams and self._last_acknowledged == self._arrivals.received

    @property
    def takes_requests(self) -> bool:
        """Whether ``submit`` may be called."""
        return self.is_ready and self._outbox.num_bytes <= MAX_KEPT_BYTES

    def submit(self, request: EngineRequest, block_hashes: Sequence[int], stream: ReplicaStream) -> None:
        """Send a request; its outputs go to ``stream``.

        Raises:
            RequestError: the request is too large, or cannot be encoded.
        """
        number = self._num_streams + 1
        data = encode_request(self._outbox.last_number + 1, number, request, block_hashes)
        if len(data) > MAX_REQUEST_BYTES:
            raise RequestError(
                f"makes a request of {len(data)} bytes, and {MAX_REQUEST_BYTES} are possible",
                param="prompt",
                remedy="shorten it",
            )
        self._num_streams = number
        self._streams[number] = stream
        self._number_of[stream] = number
        stream.replica = self.replica
        self._send_numbered(data)

    def cancel(self, stream: ReplicaStream) -> None:
        """Forget a stream; if it is unfinished, the replica aborts its request."""
        if (number := self._number_of.get(stream)) is not None:
            self._forget(number)
            self._send_numbered(encode(Abort(self._outbox.last_number + 1, number)))

    def close(self) -> None:
        """Close the sockets and fail what is unfinished."""
        self.is_ready = False
        if self._probe is not None:
            self._probe.cancel()
        for reader in self._sockets:
            reader.close()
        self._fail_streams("the link was closed")

    def tick(self) -> None:
        """Keep the connection alive; acknowledge outputs. Called about every half second."""
        if self._requests.is_closed:  # the replica was lost; it may have been a false alarm
            self._open()
        elif self._is_connected:  # else ZeroMQ would keep every Hello
            self._say_hello()
        elif self.is_ready:  # it listened when its connection broke, and may have died before it could reconnect
            self._start_probe()

    def _forget(self, number: int) -> ReplicaStream:
        stream = self._streams.pop(number)
        del self._number_of[stream]
        return stream

    def _send_numbered(self, data: bytes) -> None:
        self._outbox.add(data)
        self._send(data)

    def _say_hello(self, *, resend: bool = False) -> None:
        self._last_acknowledged, self._num_unacknowledged_bytes = self._arrivals.received, 0
        outbox = self._outbox
        hello = Hello(self.address.secret, self._arrivals.received, outbox.acknowledged, outbox.last_number, resend)
        self._send(encode(hello))

    def _send(self, data: bytes) -> None:
        """Send a message with all others of this turn of the event loop, in their order.

        Each ZeroMQ message wakes ZeroMQ's thread, which takes the core from a burst's other requests.
        """
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(data)

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        if messages:  # else the connection is another one by now
            self._requests.send(*messages)

    # --- messages -------------------------------------------------------------------------------------------------

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

    def _on_outputs(self, message: Outputs) -> None:
        streams = self._streams
        num_streams = len(streams)
        for number, token_id in zip(message.streams, message.token_ids, strict=True):
            if (stream := streams.get(number)) is not None:  # else it was cancelled
                stream.put_token(token_id)
        for number, output in message.others:
            if (stream := streams.get(number)) is not None:
                output.request_id, output.replica = stream.request_id, self.replica
                stream.put(output)
                if output.is_last:
                    self._forget(number)
                elif stream.is_full:
                    self._pause(stream)
        for failure in message.failures:
            if failure.stream in streams:
                self._fail(self._forget(failure.stream), error_of(failure, self.replica))
        if len(streams) < num_streams:
            self._on_change()

    def _pause(self, stream: ReplicaStream) -> None:
        """End a stream whose reader lags; the reader may continue its request later."""
        self.cancel(stream)
        stream.fail(StreamPausedError(f"the client of {stream.request_id} does not read"))
        ingress_recorder().increment(STREAM_PAUSES)

    def _fail(self, stream: ReplicaStream, error: Exception) -> None:
        if isinstance(error, ReplicaFullError | ReplicaDrainingError):
            self._on_returned(stream, error)
        else:
            stream.fail(error)

    def _on_status(self, status: Status) -> None:
        if status.error is not None:
            self._lose(status.error)
            return
        self._outbox.acknowledge(status.received)
        if status.resend:
            ingress_recorder().increment(CHANNEL_GAPS, content="requests")
            for _, data in self._outbox.after(status.received):
                self._send(data)
        self._find_lost_tail(status.sent)
        self.is_ready = True
        self._on_change()

    def _find_lost_tail(self, sent: int) -> None:
        """Ask for messages that were sent and do not arrive."""
        received = self._arrivals.received
        is_stalled = received < sent and received == self._received_at_last_status
        self._received_at_last_status = received
        self._num_stalled_statuses = self._num_stalled_statuses + 1 if is_stalled else 0
        if self._num_stalled_statuses >= MAX_STALLED_STATUSES:
            self._num_stalled_statuses = 0
            self._ask_for_lost_outputs()

    def _ask_for_lost_outputs(self) -> None:
        ingress_recorder().increment(CHANNEL_GAPS, content="outputs")
        self._say_hello(resend=True)

    # --- connection -----------------------------------------------------------------------------------------------

    def _on_requests_connection(self, is_connected: bool) -> None:
        self._is_connected = is_connected
        self._on_connection(is_connected)

    def _on_connection(self, is_connected: bool) -> None:
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
        address, requests = urlsplit(self.address.requests), self._requests
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(address.hostname, address.port)
        except OSError as error:  # TimeoutError is one
            if requests is self._requests:  # else another connection has been opened meanwhile
                self._lose(f"it does not listen: {type(error).__name__}")
        else:
            writer.close()

    def _lose(self, reason: str) -> None:
        """Close the connection and fail all streams; ``tick`` starts another."""
        if self._requests.is_closed:
            return
        if self.is_ready:  # without streams it may just have been shut down
            log = logger.warning if self._streams else logger.info
            log("replica %s is lost: %s", self.replica, reason)
        if self._streams:
            ingress_recorder().increment(CHANNEL_LOST_REPLICAS)
        self.is_ready = False
        for reader in self._sockets:
            reader.close()
        self._fail_streams(reason)

    def _fail_streams(self, reason: str) -> None:
        streams, self._streams = self._streams, {}
        self._number_of.clear()
        for stream in streams.values():
            error = EngineDeadError(reason)
            error.replica = self.replica
            stream.fail(error)
