"""Connection: the outputs for one ingress, in the step thread of a replica.

It is an OutputReader: after a step the thread encodes one message and sends it, with no hand-over to another thread.
What the ingress has not acknowledged is kept and, if it was lost with a connection, sent again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import zmq

from deployments.transport.request_channel.codec import encode
from deployments.transport.request_channel.errors import failure_of
from deployments.transport.request_channel.messages import Outputs
from deployments.transport.request_channel.numbering import Outbox
from deployments.transport.request_channel.sockets import Socket
from engine.outputs import EngineOutput

__all__ = ["Connection", "RequestCount"]

logger = logging.getLogger("ray.serve")


@dataclass(slots=True)
class RequestCount:
    """The requests of a replica. Each field is written by one thread only, so no lock is needed."""

    num_started: int = 0  # of the event loop
    num_ended: int = 0  # of the step thread

    @property
    def num_unfinished(self) -> int:
        """Requests that have been queued and have not ended."""
        return self.num_started - self.num_ended


class Connection:
    """The messages to one ingress. Its methods run in the step thread, those marked so in any.

    Args:
        socket: the replica's ROUTER socket for outputs; only the step thread uses it.
        identity: the ingress's.
        count: where ends of requests are counted.
    """

    def __init__(self, socket: Socket, identity: bytes, count: RequestCount) -> None:
        self._socket = socket
        self._identity = identity
        self._count = count
        self._outbox = Outbox()
        self._last_sent = 0
        self._is_closed = False
        self.acknowledged = 0  # by the ingress; the event loop writes it

    # --- any thread -----------------------------------------------------------------------------------------------

    @property
    def last_number(self) -> int:
        """Number of the last message."""
        return self._outbox.last_number

    @property
    def num_bytes(self) -> int:
        """Size of the messages that are kept."""
        return self._outbox.num_bytes

    @property
    def has_unsent(self) -> bool:
        """Whether messages wait until the ingress is connected."""
        return self._last_sent < self._outbox.last_number

    # --- OutputReader; the tags are the ingress's streams ------------------------------------------------------------

    def publish(self, tags: list[int], token_ids: list[int], others: list[tuple[int, EngineOutput]]) -> None:
        """Send the outputs of one step."""
        self._count.num_ended += sum(output.is_last for _, output in others)
        self._send(Outputs(self._outbox.last_number + 1, tags, token_ids, others, []))

    def fail(self, stream: int, error: Exception) -> None:
        """Send the error of a request that was queued."""
        self._count.num_ended += 1
        self.refuse(stream, error)

    def end(self, stream: int) -> None:
        """Count the end of a request that the ingress has aborted; it expects no answer."""
        self._count.num_ended += 1

    # --- the step thread ------------------------------------------------------------------------------------------

    def refuse(self, stream: int, error: Exception) -> None:
        """Send the error of a request that was never queued."""
        self._send(Outputs(self._outbox.last_number + 1, [], [], [], [failure_of(stream, error)]))

    def resend(self, received: int) -> None:
        """Send the messages after ``received`` again."""
        self._last_sent = min(self._last_sent, max(received, self._outbox.acknowledged))
        self.flush()

    def flush(self) -> None:
        """Send what was not sent, as far as the ingress is connected."""
        for number, data in self._outbox.after(self._last_sent):
            try:
                self._socket.send_multipart((self._identity, data), zmq.NOBLOCK)
            except zmq.ZMQError:  # EHOSTUNREACH: not connected now; its next Hello sends the rest
                return
            self._last_sent = number

    def close(self) -> None:
        """Forget the messages; the ingress is lost."""
        self._is_closed = True
        self._outbox.clear()

    def _send(self, message: Outputs) -> None:
        if self._is_closed:
            return
        self._outbox.acknowledge(self.acknowledged)
        self._outbox.add(encode(message))
        self.flush()
