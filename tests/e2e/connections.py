"""Cuts TCP connections between the processes of a server, from outside: neither process notices before the other.

It takes a copy of the socket from a process with pidfd_getfd(2), which Linux 5.6 allows to those that may trace it.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Collection
from contextlib import closing

import psutil

SYS_PIDFD_GETFD = 438


def channel_connections(engine: int, ingresses: Collection[int]) -> list[int]:
    """Return the file descriptors of an engine's connections to ingresses, Ray's excepted.

    Only ingresses connect to the ports of the channel and of the KV events, and many processes to those of Ray.
    """
    from_ingresses = {(conn.laddr.ip, conn.laddr.port) for pid in ingresses for conn in _connections(pid)}
    accepted: dict[int, list[tuple[int, bool]]] = {}
    own = _connections(engine)
    listening = {conn.laddr.port for conn in own if conn.status == psutil.CONN_LISTEN}
    for conn in own:
        if conn.status == psutil.CONN_ESTABLISHED and conn.laddr.port in listening:
            is_ours = (conn.raddr.ip, conn.raddr.port) in from_ingresses
            accepted.setdefault(conn.laddr.port, []).append((conn.fd, is_ours))
    return [fd for pairs in accepted.values() if all(is_ours for _, is_ours in pairs) for fd, _ in pairs]


def cut(pid: int, fd: int) -> None:
    """Shut down a socket of another process.

    Raises:
        OSError: the process may not be traced, or the socket has been closed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        copied = libc.syscall(SYS_PIDFD_GETFD, process, fd, 0)
        if copied < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        with closing(socket.socket(fileno=copied)) as copy:
            copy.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(process)


def _connections(pid: int) -> list[psutil._common.pconn]:
    try:
        return psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return []
