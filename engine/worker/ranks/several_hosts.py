"""SeveralHosts: each rank on a host of its own, from where it connects to rank 0.

A program that knows the hosts starts the ranks: each runs ``rank_process.join`` with its Invitation. Both sides of a
connection prove that they know the engine's secret before anything is unpickled. It ends when a host does not answer
for some seconds; the end of a process closes it at once.
"""

from __future__ import annotations

import secrets
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from torch._C._distributed_c10d import TCPStore

from engine.errors import EngineDeadError
from engine.worker.ranks.rank_hosts import Rank, RankHandle

__all__ = ["Invitation", "SeveralHosts"]

_START_SECONDS = 600.0  # a new host may first have to load an image's Python packages from a slow disk
_CHECK_SECONDS = 1.0  # between two looks at the ranks that have not connected
_GREETING_SECONDS = 5
_SILENCE_SECONDS = 10  # of a host, after which it is taken for lost
_SEND_SECONDS = 60  # a rank that accepts no call for this long hangs


@dataclass(frozen=True)
class Invitation:
    """What a rank needs to find rank 0. It pickles."""

    number: int  # of the rank
    host: str  # rank 0's
    port: int
    secret: bytes

    def accept(self, own_host: str) -> Connection:
        """Connect to rank 0, and tell it on which host this rank is.

        Raises:
            OSError: if rank 0 cannot be reached.
            AuthenticationError: if another program listens there, or the secret is another engine's.
        """
        connection = _prepared(socket.create_connection((self.host, self.port), timeout=_START_SECONDS))
        answer_challenge(connection, self.secret)
        deliver_challenge(connection, self.secret)
        connection.send((self.number, own_host))
        return connection


class SeveralHosts:
    """Ranks on hosts of their own.

    Args:
        host: this host's address, which the others reach.
        start_rank: starts a rank somewhere, which is to accept the invitation.
    """

    def __init__(self, host: str, start_rank: Callable[[Invitation], RankHandle]) -> None:
        self.own_address = host
        self._start_rank = start_rank
        with socket.create_server((host, 0)) as listener:
            port = listener.getsockname()[1]
            # The store of torch listens on all interfaces unless it gets a socket.
            self._store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        self.rendezvous = f"tcp://{host}:{port}"

    def start(self, size: int) -> list[Rank]:
        """Start the ranks, and wait for their connections.

        Raises:
            EngineDeadError: if one does not connect in time.
        """
        secret, ranks = secrets.token_bytes(32), dict[int, Rank]()
        with socket.create_server((self.own_address, 0)) as listener:
            listener.settimeout(_CHECK_SECONDS)
            host, port = listener.getsockname()[:2]
            invitations = [Invitation(number, host, port, secret) for number in range(1, size)]
            handles = {invitation.number: self._start_rank(invitation) for invitation in invitations}
            deadline = time.monotonic() + _START_SECONDS
            while missing := handles.keys() - ranks.keys():
                try:
                    accepted, _ = listener.accept()
                except TimeoutError:
                    if (problem := _problem(handles, missing, deadline)) is None:
                        continue
                    for handle in handles.values():
                        handle.kill()
                    number, what = problem
                    raise EngineDeadError(f"tensor-parallel rank {number} of {size} {what}") from None
                with suppress(OSError, EOFError, AuthenticationError, ValueError):  # of another program that connects
                    number, host, connection = _greet(accepted, secret)
                    ranks[number] = Rank(number, handles[number], connection, host)
        return [ranks[number] for number in sorted(ranks)]

    def close(self) -> None:
        """Forget the store."""
        del self._store


def _problem(handles: dict[int, RankHandle], missing: set[int], deadline: float) -> tuple[int, str] | None:
    """Return a rank that will not connect, and why."""
    for number in sorted(missing):
        with suppress(subprocess.TimeoutExpired):
            handles[number].wait(0)
            return number, "ended before it connected; its log says why"
    if time.monotonic() < deadline:
        return None
    return min(missing), f"has not connected for {_START_SECONDS:g} s; let all ports between the hosts be open"


def _greet(accepted: socket.socket, secret: bytes) -> tuple[int, str, Connection]:
    """Return the number and the host of a rank that has just connected.

    Raises:
        OSError, EOFError, AuthenticationError, ValueError: it is no rank of this engine.
    """
    _limit(accepted, socket.SO_RCVTIMEO, _GREETING_SECONDS)
    connection = _prepared(accepted)
    deliver_challenge(connection, secret)
    answer_challenge(connection, secret)
    number, host = connection.recv()
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as copy:
        _limit(copy, socket.SO_RCVTIMEO, 0)
    return number, host, connection


def _prepared(connected: socket.socket) -> Connection:
    """Return a connection that ends soon after the other host is lost."""
    connected.settimeout(None)
    _limit(connected, socket.SO_SNDTIMEO, _SEND_SECONDS)
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


def _limit(connected: socket.socket, option: int, seconds: int) -> None:
    connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
