"""A network in memory: the sockets of the channel, whose messages move, and whose connections break, when asked to.

It behaves as ZeroMQ does over TCP. A DEALER keeps what it could not send and reconnects; a ROUTER refuses to send to a
peer that is not connected; what is on the way when a connection breaks is lost.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import zmq

OnMessage = Callable[[list[bytes]], None]


class Router:
    """A bound ROUTER socket."""

    def __init__(self) -> None:
        self.lines: dict[bytes, Line] = {}
        self.is_dead = False
        self.on_message: OnMessage | None = None

    def send_multipart(self, frames: tuple[bytes, bytes], flags: int = 0) -> None:
        identity, data = frames
        line = self.lines.get(identity)
        if line is None or not line.is_up:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        line.to_dealer.append(data)

    def close(self, linger: int = 0) -> None:
        self.is_dead = True


class Line:
    """A connection between a DEALER and a ROUTER; it is the DEALER's socket, too."""

    def __init__(self, router: Router, identity: bytes) -> None:
        self.router = router
        self.identity = identity
        self.is_up = False
        self.to_router: deque[tuple[bytes, ...]] = deque()
        self.to_dealer: deque[bytes] = deque()
        self.on_message: OnMessage | None = None
        self.on_event: Callable[[bool], None] | None = None
        router.lines[identity] = self

    def send_multipart(self, frames: tuple[bytes, ...], flags: int = 0) -> None:
        self.to_router.append(frames)

    def close(self, linger: int = 0) -> None:
        self.is_up = False
        self.to_router.clear()
        self.on_message = self.on_event = None
        if self.router.lines.get(self.identity) is self:
            del self.router.lines[self.identity]

    def move(self, count: int) -> None:
        """Let up to ``count`` messages arrive in each direction."""
        for _ in range(count):
            if self.is_up and self.to_router and self.router.on_message is not None:
                self.router.on_message([self.identity, *self.to_router.popleft()])
            if self.to_dealer and self.on_message is not None:  # what has arrived is read also after a break
                self.on_message([self.to_dealer.popleft()])

    def lose(self, count: int) -> None:
        """Lose the next messages in each direction, without a break."""
        for _ in range(min(count, len(self.to_router))):
            self.to_router.popleft()
        for _ in range(min(count, len(self.to_dealer))):
            self.to_dealer.popleft()

    def cut(self, num_arrived: int) -> None:
        """Break the connection; only the first ``num_arrived`` messages to the DEALER have arrived."""
        if not self.is_up:
            return
        self.is_up = False
        while len(self.to_dealer) > num_arrived:
            self.to_dealer.pop()
        if self.to_router:
            self.to_router.popleft()  # it was half sent
        if self.on_event is not None:
            self.on_event(False)

    def connect(self) -> None:
        """Connect, if the replica listens."""
        if not self.is_up and not self.router.is_dead and self.on_event is not None:
            self.is_up = True
            self.on_event(True)


class Reader:
    """A SocketReader whose messages come when the network moves them."""

    def __init__(self, socket: Any, on_message: OnMessage) -> None:
        self.socket = socket
        self.is_closed = False
        socket.on_message = on_message

    def send(self, *frames: bytes) -> None:
        if not self.is_closed:
            with contextlib.suppress(zmq.ZMQError):
                self.socket.send_multipart(frames)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.socket.close()


class Watcher:
    """The reader of a line's events."""

    def __init__(self, line: Line, on_event: Callable[[bool], None]) -> None:
        self._line = line
        line.on_event = on_event

    def close(self) -> None:
        self._line.on_event = None


class Network:
    """All sockets of a test."""

    def __init__(self) -> None:
        self.routers: dict[int, Router] = {}

    @property
    def lines(self) -> list[Line]:
        """The lines of all links that are open."""
        return [line for router in self.routers.values() for line in router.lines.values()]

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Give the channel these sockets in the ``with`` block."""
        sockets = {"SocketReader": Reader, "watch_connection": Watcher, "connect_dealer": self._connect}
        with (
            patch.multiple("deployments.transport.request_channel.replica_connection", **sockets),
            patch.multiple("deployments.transport.request_channel.server", SocketReader=Reader, bind_router=self._bind),
            patch("asyncio.open_connection", self._open_connection),
        ):
            yield

    def _bind(self, context: object, host: str) -> tuple[Router, str]:
        port = len(self.routers) + 1
        self.routers[port] = Router()
        return self.routers[port], f"tcp://127.0.0.1:{port}"

    def _connect(self, context: object, endpoint: str, identity: bytes) -> tuple[Line, Line]:
        line = Line(self.routers[int(endpoint.rpartition(":")[2])], identity)
        return line, line

    async def _open_connection(self, host: str, port: int) -> tuple[None, Any]:
        """Answer the probe of a replica whose connection was lost."""
        if self.routers[port].is_dead:
            raise ConnectionRefusedError
        return None, Router()  # something to close
