"""The ZeroMQ sockets of publishers and subscribers, with all their limits.

A publisher binds to one address of its node, never to all of them; a subscriber connects to a literal address and
port, so no name server is involved. A full queue drops messages instead of blocking, and ZeroMQ reconnects without
reporting it: both are gaps, which the receiver detects by the messages' numbers. This module knows nothing of them.
"""

from __future__ import annotations

import re
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address

import zmq

from deployments.transport.kv_events.messages import MAX_SNAPSHOT_BYTES
from engine.errors import ConfigError

__all__ = [
    "Wakeup",
    "address_of",
    "bind_publisher",
    "check_endpoint",
    "connect_subscriber",
    "set_common",
    "set_heartbeats",
    "url_host",
]

MAX_SUBSCRIPTION_BYTES = 4096  # of a message to a publisher: subscriptions
ENVELOPE_BYTES = 4096  # of a snapshot, beyond its hashes
ALIVE_IVL_MS, ALIVE_TIMEOUT_MS = 1000, 5000  # heartbeats; a connection whose peer is gone is closed
RECONNECT_IVL_MS, RECONNECT_MAX_MS = 100, 2000
CONNECT_TIMEOUT_MS = 3000
MAX_RECEIVED = 1024  # messages queued for the subscriber's thread, per replica

_ENDPOINT = re.compile(r"tcp://(?P<host>[0-9.]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


class Wakeup:
    """Ends another thread's poll. Any thread may ring; rings before the next ``clear`` count as one."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._has_rung = False

    def ring(self) -> None:
        """Wake the other thread. Never blocks; does nothing after ``close``."""
        if not self._has_rung:
            self._has_rung = True
            try:
                self._writer.send(b"\0")
            except OSError:  # closed; or full, and then the other thread wakes anyway
                return

    def clear(self) -> None:
        """Consume the rings. Call it before reading the announced data; else later data could be missed."""
        try:
            self.reader.recv(64)
        except BlockingIOError:
            return
        self._has_rung = False

    def close(self) -> None:
        """Close both ends."""
        self.reader.close()
        self._writer.close()


def bind_publisher(
    context: zmq.Context[zmq.Socket[bytes]], host: str, max_queued: int
) -> tuple[zmq.Socket[bytes], str]:
    """Return an XPUB socket on a free port of ``host``, and its endpoint.

    Raises:
        ConfigError: ``host`` is not an address of this node.
    """
    address = address_of(host)
    publisher = context.socket(zmq.XPUB)
    publisher.setsockopt(zmq.SNDHWM, max_queued)
    publisher.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
    set_common(publisher, address)
    set_heartbeats(publisher)
    try:
        publisher.bind(f"tcp://{url_host(address)}:*")
    except zmq.ZMQError as error:
        publisher.close(0)
        raise ConfigError(f"cannot listen on host={host!r}: {error}; give an address of this node") from None
    return publisher, publisher.getsockopt_string(zmq.LAST_ENDPOINT)


def connect_subscriber(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """Return a SUB socket that connects, and reconnects, to ``endpoint``; raises what ``check_endpoint`` raises.

    It has a limited queue, and so no heartbeats (see ``set_heartbeats``). The publisher's load reports show that the
    connection is alive, and the subscriber replaces the socket if they stop.
    """
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.RCVHWM, MAX_RECEIVED)
    subscriber.setsockopt(zmq.MAXMSGSIZE, MAX_SNAPSHOT_BYTES + ENVELOPE_BYTES)
    subscriber.setsockopt(zmq.RECONNECT_IVL, RECONNECT_IVL_MS)
    subscriber.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    subscriber.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    set_common(subscriber, check_endpoint(endpoint))
    subscriber.connect(endpoint)
    return subscriber


def check_endpoint(endpoint: str) -> IPv4Address | IPv6Address:
    """Return the address in ``endpoint``; raises ConfigError unless it is ``tcp://<address>:<port>`` of one host."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 0 < int(match["port"]) < 2**16:
        raise ConfigError(f"endpoint={endpoint[:80]!r} is not tcp://<address>:<port>")
    return address_of(match["host"].strip("[]"))


def set_common(target: zmq.Socket[bytes], address: IPv4Address | IPv6Address) -> None:
    """Set the options of every socket to or at ``address``."""
    target.setsockopt(zmq.LINGER, 0)
    target.setsockopt(zmq.IPV6, int(address.version == 6))


def set_heartbeats(target: zmq.Socket[bytes]) -> None:
    """Close a connection of this socket whose peer does not answer for ``ALIVE_TIMEOUT_MS``.

    A socket that connects must not limit what it has received (RCVHWM). libzmq stops reading a connection while that
    queue is full, takes the peer for dead because it does not read the peer's answers, and connects again. When the
    queue is read then, it resumes the new connection, which has not stopped, and its assertion ``_input_stopped`` ends
    the process. A socket that binds gives each connection a queue of its own.
    """
    connects = target.type in (zmq.SUB, zmq.DEALER)
    assert not connects or target.getsockopt(zmq.RCVHWM) == 0, "libzmq would end the process; see the docstring"
    target.setsockopt(zmq.HEARTBEAT_IVL, ALIVE_IVL_MS)
    target.setsockopt(zmq.HEARTBEAT_TIMEOUT, ALIVE_TIMEOUT_MS)


def address_of(host: str) -> IPv4Address | IPv6Address:
    """Return the address of one host; raises ConfigError for a name, or for an address of several hosts."""
    try:
        address = ip_address(host)
    except ValueError:
        raise ConfigError(f"host={host[:80]!r} is not an IP address; give the node's own") from None
    plain = getattr(address, "ipv4_mapped", None) or address
    if plain.is_unspecified or plain.is_multicast:
        raise ConfigError(f"host={host!r} is not one host; give the node's own address")
    return address


def url_host(address: IPv4Address | IPv6Address) -> str:
    """Return an address as a URL names it."""
    return f"[{address}]" if address.version == 6 else str(address)
