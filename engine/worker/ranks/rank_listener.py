"""RankListener and Invitation: how ranks on other hosts connect to rank 0.

Both sides of a connection prove that they know the engine's secret before anything is unpickled. Rank 0 checks each
connection in a thread of its own, so another program that connects, and sends nothing or too little, delays no rank.
A connection ends when the other host does not answer for some seconds; the end of a process closes it at once.
"""

from __future__ import annotations

import logging
import secrets
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue
from types import TracebackType
from typing import Self

__all__ = ["Invitation", "RankListener", "listen"]

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 600.0
_WAIT_SECONDS = 0.1  # for the next connection, before the caller can check something else
_HANDSHAKE_SECONDS = 30  # between two messages of a handshake; ranks on CPUs yield to other processes
_SILENCE_SECONDS = 10  # of a host, after which it is taken for lost; Linux: or of a rank that takes no more data
_SEND_SECONDS = 60  # likewise without TCP_USER_TIMEOUT


@dataclass(frozen=True)
class Invitation:
    """What a rank needs to find rank 0. It pickles."""

    number: int  # of the rank
    host: str  # rank 0's
    port: int
    secret: bytes = field(repr=False)

    def accept(self, own_host: str) -> Connection:
        """Connect to rank 0, and send it the address of this rank's host.

        Raises:
            OSError: if rank 0 cannot be reached.
            AssertionError, AuthenticationError: if another program listens there, or the secret is another engine's.
        """
        connection = _prepared(socket.create_connection((self.host, self.port), timeout=_CONNECT_SECONDS))
        answer_challenge(connection, self.secret)
        deliver_challenge(connection, self.secret)
        connection.send((self.number, own_host))
        return connection


class RankListener:
    """A socket on which rank 0 listens for the other ranks of an engine, while they start.

    Args:
        host: the address of this host, which the others reach.
    """

    def __init__(self, host: str) -> None:
        self._secret = secrets.token_bytes(32)
        self._admitted: SimpleQueue[tuple[int, str, Connection]] = SimpleQueue()
        self._listener = listen(host)
        self._listener.settimeout(_WAIT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._listener.close()

    def invite(self, number: int) -> Invitation:
        """Return the invitation of a rank."""
        host, port = self._listener.getsockname()[:2]
        return Invitation(number, host, port, self._secret)

    def take(self) -> list[tuple[int, str, Connection]]:
        """Wait a moment for a connection; return the number, the host and the connection of each admitted rank."""
        with suppress(OSError, RuntimeError):  # none has come, or too many for this process
            accepted, _ = self._listener.accept()
            threading.Thread(target=self._admit, args=(accepted,), daemon=True).start()
        return [self._admitted.get() for _ in range(self._admitted.qsize())]

    def _admit(self, accepted: socket.socket) -> None:
        with accepted:
            _limit(accepted.fileno(), socket.SO_RCVTIMEO, _HANDSHAKE_SECONDS)
            connection = _prepared(accepted)
        try:
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            number, host = connection.recv()
            _limit(connection.fileno(), socket.SO_RCVTIMEO, 0)
            self._admitted.put((number, host, connection))
        except (OSError, EOFError, AuthenticationError, ValueError) as error:  # another program; the connection ends
            logger.info("a connection that is not a tensor-parallel rank was refused: %s", error)


def listen(host: str) -> socket.socket:
    """Return a socket that listens on a free port of an address, IPv4 or IPv6."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _prepared(connected: socket.socket) -> Connection:
    """Return a connection that ends soon after the other host is lost."""
    connected.settimeout(None)
    _limit(connected.fileno(), socket.SO_SNDTIMEO, _SEND_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 2),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", _SILENCE_SECONDS // 2 - 1),
        ("TCP_USER_TIMEOUT", 1000 * _SILENCE_SECONDS),  # the same while data is on its way
    ):
        if (option := getattr(socket, name, None)) is not None:  # Linux has them
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(connected.detach())


def _limit(fd: int, option: int, seconds: int) -> None:
    """Set the time-out of a socket's reads or writes; 0: none."""
    with socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as copy:
        copy.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
