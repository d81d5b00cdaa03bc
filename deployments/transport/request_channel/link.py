"""Link: one replica as an ingress sees it: requests to it, and their outputs by stream.

A stream is a request's number among those of one connection; it leads to the request's Dispatch. When the replica is
lost, all streams fail. The connection (replica_connection.py) numbers the messages and repeats lost ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq

from deployments.observability.ingress_metrics import CHANNEL_LOST_REPLICAS, STREAM_PAUSES, ingress_recorder
from deployments.transport.request_channel.address import ReplicaAddress
from deployments.transport.request_channel.codec import encode, encode_copy, encode_request
from deployments.transport.request_channel.dispatch import Dispatch
from deployments.transport.request_channel.errors import (
    HandedOverError,
    ReplicaDrainingError,
    ReplicaFullError,
    StreamPausedError,
    error_of,
)
from deployments.transport.request_channel.messages import Abort, Outputs
from deployments.transport.request_channel.replica_connection import ReplicaConnection
from deployments.transport.request_channel.sockets import MAX_REQUEST_BYTES, Socket
from engine.errors import EngineDeadError, RequestError
from engine.kv.tiers.copies import CopyOrder

__all__ = ["Link"]

logger = logging.getLogger("ray.serve")


class Link:
    """The requests at one replica.

    Args:
        replica: its name.
        address: where it is.
        context: of the sockets.
        on_change: called when the link may take requests that it did not take before.
        on_returned: called with a dispatch whose request the replica did not take, and its ReplicaFullError or
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
        on_returned: Callable[[Dispatch, Exception], None],
    ) -> None:
        self.replica = replica
        self.address = address
        self._on_change = on_change
        self._on_returned = on_returned
        self._is_draining = False
        self._last_stream = 0
        self._streams: dict[int, Dispatch] = {}  # unfinished
        self._connection = ReplicaConnection(
            address, context, on_ready=on_change, on_outputs=self._queue_outputs, on_lost=self._lose
        )

    @property
    def num_streams(self) -> int:
        """Number of unfinished streams."""
        return len(self._streams)

    @property
    def is_idle(self) -> bool:
        """Whether all streams have ended, and the replica knows that their outputs have arrived."""
        return not self._streams and self._connection.all_acknowledged

    @property
    def takes_requests(self) -> bool:
        """Whether ``submit`` may be called."""
        return self._connection.takes_requests and not self._is_draining

    @property
    def is_lost(self) -> bool:
        """Whether the replica was lost and has not answered since."""
        return self._connection.is_lost

    def submit(self, dispatch: Dispatch) -> None:
        """Send a dispatch's request; its outputs go to the dispatch.

        Raises:
            RequestError: the request is too large, or cannot be encoded.
        """
        stream = self._last_stream + 1
        data = encode_request(self._connection.next_number, stream, dispatch.request, dispatch.block_hashes)
        if len(data) > MAX_REQUEST_BYTES:
            raise RequestError(
                f"makes a request of {len(data)} bytes, and {MAX_REQUEST_BYTES} are possible",
                param="prompt",
                remedy="shorten it",
            )
        self._last_stream = dispatch.stream = stream
        self._streams[stream] = dispatch
        dispatch.replica = self.replica
        self._connection.send_numbered(data)

    def copy(self, order: CopyOrder) -> None:
        """Let the replica read the KV of a text from another one. It is a hint: nothing says whether it does."""
        if self.takes_requests and len(data := encode_copy(order)) <= MAX_REQUEST_BYTES:
            self._connection.send(data)

    def cancel(self, dispatch: Dispatch) -> None:
        """Forget a dispatch; if it is unfinished and was sent here, the replica aborts its request."""
        if self._streams.get(dispatch.stream) is dispatch:
            del self._streams[dispatch.stream]
            self._connection.send_numbered(encode(Abort(self._connection.next_number, dispatch.stream)))

    def tick(self) -> None:
        """Keep the connection alive; acknowledge outputs. Called about every half second."""
        self._connection.tick()

    def close(self) -> None:
        """Close the connection and fail what is unfinished."""
        self._connection.close()
        self._fail_streams("the link was closed")

    def _queue_outputs(self, message: Outputs) -> None:
        """Pass the outputs of one step to their dispatches."""
        streams = self._streams
        num_streams = len(streams)
        for stream, token_id in zip(message.streams, message.token_ids, strict=True):
            if (dispatch := streams.get(stream)) is not None:  # else it was cancelled
                dispatch.put_token(token_id)
        for stream, output in message.others:
            if (dispatch := streams.get(stream)) is not None:
                output.request_id, output.replica = dispatch.request.request_id, self.replica
                dispatch.put(output)
                if output.is_last:
                    del streams[stream]
                elif dispatch.is_full:
                    self._pause(dispatch)
        for failure in message.failures:
            if (dispatch := streams.pop(failure.stream, None)) is not None:
                self._fail(dispatch, error_of(failure, self.replica))
        if len(streams) < num_streams:
            self._on_change()

    def _pause(self, dispatch: Dispatch) -> None:
        """End a dispatch whose reader lags; the reader may continue the request later."""
        self.cancel(dispatch)
        dispatch.fail(StreamPausedError(f"the client of {dispatch.request.request_id} does not read"))
        ingress_recorder().increment(STREAM_PAUSES)

    def _fail(self, dispatch: Dispatch, error: Exception) -> None:
        dispatch.is_handed_over = isinstance(error, HandedOverError)
        self._is_draining |= dispatch.is_handed_over or isinstance(error, ReplicaDrainingError)
        if isinstance(error, ReplicaFullError | ReplicaDrainingError):
            self._on_returned(dispatch, error)
        else:
            dispatch.fail(error)

    def _lose(self, reason: str, was_ready: bool) -> None:
        """Fail all streams of a lost replica."""
        if was_ready:  # without streams it may just have been shut down
            log = logger.warning if self._streams else logger.info
            log("replica %s is lost: %s", self.replica, reason)
        if self._streams:
            ingress_recorder().increment(CHANNEL_LOST_REPLICAS)
        self._fail_streams(reason)

    def _fail_streams(self, reason: str) -> None:
        streams, self._streams = self._streams, {}
        for dispatch in streams.values():
            error = EngineDeadError(reason)
            error.replica = self.replica
            dispatch.fail(error)
