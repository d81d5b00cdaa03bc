"""The ZeroMQ sockets of the channel, and how an event loop reads them.

A replica binds two ROUTER sockets to the address of its node: its event loop receives requests on one, its step thread
sends outputs on the other. An ingress connects a DEALER socket to each, both under one random identity. ZeroMQ
reconnects by itself and loses what was on the way; the numbers of the messages show that (numbering.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from deployments.transport.kv_events.sockets import address_of, check_endpoint, set_common, set_heartbeats, url_host
from engine.errors import ConfigError

__all__ = ["MAX_REQUEST_BYTES", "SocketReader", "bind_router", "connect_dealer", "watch_connection"]

logger = logging.getLogger("ray.serve")

MAX_REQUEST_BYTES = 64 * 2**20  # of one request message
RECONNECT_IVL_MS, RECONNECT_MAX_MS = 20, 500
CONNECT_TIMEOUT_MS, HANDSHAKE_TIMEOUT_MS = 3000, 5000
MAX_MESSAGES_PER_TURN = 64  # of one socket, before the event loop does something else

Socket = zmq.Socket[bytes]


def bind_router(context: zmq.Context[Socket], host: str) -> tuple[Socket, str]:
    """Return a ROUTER socket on a free port of ``host``, and its endpoint.

    A message to an ingress that is not connected fails with EHOSTUNREACH; one that connects again under its identity
    replaces its old connection.

    Raises:
        ConfigError: ``host`` is not an address of this node.
    """
    address = address_of(host)
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    _set_options(socket)
    set_common(socket, address)
    set_heartbeats(socket)
    try:
        socket.bind(f"tcp://{url_host(address)}:*")
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(f"cannot listen on host={host!r}: {error}; give an address of this node") from None
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect_dealer(context: zmq.Context[Socket], endpoint: str, identity: bytes) -> tuple[Socket, Socket]:
    """Return a DEALER socket that connects, and reconnects, to ``endpoint``, and the socket of its events.

    Raises:
        ConfigError: as ``check_endpoint``.
    """
    address = check_endpoint(endpoint)
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_IVL_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    _set_options(socket)
    set_common(socket, address)
    set_heartbeats(socket)
    events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(endpoint)
    return socket, events


def _set_options(socket: Socket) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)  # a message is never dropped here: the outboxes have a limit of their own
    socket.setsockopt(zmq.RCVHWM, 0)  # set_heartbeats depends on it
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)


class SocketReader:
    """Calls a function with each message that a socket receives, on the running event loop.

    ZeroMQ's file descriptor announces new messages once, and sending may consume the announcement, so ``send`` looks
    for messages too.

    Args:
        socket: used by this event loop alone.
        on_message: receives the frames of a message; its exceptions are logged.
    """

    def __init__(self, socket: Socket, on_message: Callable[[list[bytes]], None]) -> None:
        self.socket = socket
        self.is_closed = False
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.fileno()
        self._loop.add_reader(self._descriptor, self._read)
        self._loop.call_soon(self._read)  # what was announced before

    def send(self, *frames: bytes) -> None:
        """Send a message. If it cannot be sent now it is lost, as if the connection were."""
        if self.is_closed:
            return
        with contextlib.suppress(zmq.ZMQError):  # EHOSTUNREACH at a ROUTER
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        if int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._read)

    def close(self) -> None:
        """Stop reading and close the socket."""
        if not self.is_closed:
            self.is_closed = True
            self._loop.remove_reader(self._descriptor)
            # Before the reader of its events is closed: ZeroMQ's I/O thread would wait forever for one.
            self.socket.disable_monitor()
            self.socket.close(0)

    def _read(self) -> None:
        for _ in range(MAX_MESSAGES_PER_TURN):
            if self.is_closed:
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(frames)
            except Exception:
                logger.exception("a message of the channel could not be processed")
        self._loop.call_soon(self._read)


def watch_connection(events: Socket, on_event: Callable[[bool], None]) -> SocketReader:
    """Call ``on_event`` when a DEALER socket has connected (True) or lost its connection (False)."""

    def read(frames: list[bytes]) -> None:
        on_event(parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)

    return SocketReader(events, read)
