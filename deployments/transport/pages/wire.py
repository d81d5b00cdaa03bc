"""Wire: one end of a TCP connection between a page client and a page server.

Messages and the bytes of pages are sent and received in whole, each within a deadline. The socket blocks, and the
kernel keeps its time-outs: one system call moves megabytes from or to the pages themselves, without the interpreter's
lock, which the step thread needs more than this one.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import Final

from deployments.transport.pages.messages import FromClient, FromServer, PageMessageError, encode

__all__ = ["SHORTEST_S", "PeerGoneError", "PeerStalledError", "Wire"]

_LENGTH: Final = struct.Struct("<I")
_TIMEVAL: Final = struct.Struct("@ll")  # of the kernel: seconds, microseconds
MAX_BUFFERS: Final = 1024  # of one system call: IOV_MAX
SHORTEST_S: Final = 0.001  # 0 would mean no time-out


class PeerGoneError(OSError):
    """The peer has closed the connection."""


class PeerStalledError(OSError):
    """The peer did not send, or take, the bytes within the deadline."""


class Wire:
    """Sends and receives over a connected socket. One thread uses it; any thread may call ``cut``.

    Every deadline is a time of ``monotonic``. All methods raise OSError if the connection breaks, PeerGoneError if the
    peer ends it and PeerStalledError at the deadline; afterwards the connection can only be closed.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected

    def send(self, message: FromClient | FromServer, deadline: float, parts: Iterable[memoryview] = ()) -> None:
        """Send a message, and the bytes that follow it."""
        data = encode(message)
        buffers = [memoryview(_LENGTH.pack(len(data)) + data), *parts]
        while buffers:
            self._set_timeout(socket.SO_SNDTIMEO, deadline)
            try:
                num_sent = self._socket.sendmsg(buffers[:MAX_BUFFERS])
            except BlockingIOError:
                raise PeerStalledError("the peer does not receive") from None
            buffers = list(_after(buffers, num_sent))

    def receive(self, max_bytes: int, deadline: float) -> bytes:
        """Return the next message, undecoded; raises PageMessageError if it is longer than ``max_bytes``."""
        length = bytearray(_LENGTH.size)
        self.receive_into([memoryview(length)], deadline)
        (num_bytes,) = _LENGTH.unpack(length)
        if num_bytes > max_bytes:
            raise PageMessageError(f"a message of {num_bytes} bytes exceeds the limit of {max_bytes}")
        data = bytearray(num_bytes)
        self.receive_into([memoryview(data)], deadline)
        return bytes(data)

    def receive_into(self, buffers: list[memoryview], deadline: float) -> None:
        """Fill the buffers, which are writable and of bytes, in their order."""
        buffers = [buffer for buffer in buffers if len(buffer)]
        while buffers:
            self._set_timeout(socket.SO_RCVTIMEO, deadline)
            try:
                num_received, *_ = self._socket.recvmsg_into(buffers[:MAX_BUFFERS], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise PeerStalledError("the peer does not send") from None
            if not num_received:
                raise PeerGoneError("the peer has closed the connection")
            buffers = list(_after(buffers, num_received))

    @property
    def is_quiet(self) -> bool:
        """Whether the peer has neither sent anything nor closed the connection."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def cut(self) -> None:
        """End the connection, so that a call that another thread waits in fails."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _set_timeout(self, option: int, deadline: float) -> None:
        """Let the next system call end at ``deadline``."""
        remaining = deadline - monotonic()
        if remaining <= 0:
            raise PeerStalledError("the deadline has passed")
        fraction, seconds = math.modf(max(remaining, SHORTEST_S))
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(fraction * 1e6)))


def _after(buffers: list[memoryview], num_bytes: int) -> Iterator[memoryview]:
    """Yield what follows the first ``num_bytes`` of some buffers."""
    for buffer in buffers:
        if num_bytes < len(buffer):
            yield buffer[num_bytes:] if num_bytes else buffer
        num_bytes = max(0, num_bytes - len(buffer))
