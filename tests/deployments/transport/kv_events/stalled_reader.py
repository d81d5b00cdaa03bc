"""A program whose two subscribers read nothing for longer than the heartbeats allow, and then go on.

Its argument says which of them goes on: ``product``, the socket of KVEventSubscriber, or ``heartbeats``, the same with
heartbeats. It prints what it does; libzmq may abort it.
"""

from __future__ import annotations

import resource
import sys

import zmq
from zmq.utils.monitor import parse_monitor_message

from deployments.transport.kv_events import sockets
from deployments.transport.kv_events.sockets import connect_subscriber, set_common

Socket = zmq.Socket[bytes]

HEARTBEAT_MS, TIMEOUT_MS = 20, 40
MESSAGE, MARK = bytes(2**16), b"mark"


def publisher_of(context: zmq.Context[Socket]) -> Socket:
    """Return a publisher that never closes a connection by itself."""
    socket = context.socket(zmq.XPUB)
    socket.setsockopt(zmq.SNDHWM, 16)
    socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # reports each subscriber
    set_common(socket, sockets.address_of("127.0.0.1"))
    socket.bind("tcp://127.0.0.1:*")
    return socket


def with_heartbeats(context: zmq.Context[Socket], endpoint: str) -> tuple[Socket, Socket]:
    """Return the subscriber that the product must not have, and the socket of its connections."""
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 4)
    socket.setsockopt(zmq.RECONNECT_IVL, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, TIMEOUT_MS)
    events = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.subscribe(b"")
    socket.connect(endpoint)
    return socket, events


def publish_until_reconnected(publisher: Socket, events: Socket) -> None:
    """Send messages until the subscriber with heartbeats has lost its connection and has another."""
    num_connections = 0
    while num_connections < 2:
        publisher.send(MESSAGE, zmq.NOBLOCK)  # which a full queue drops
        while events.poll(1):
            assert parse_monitor_message(events.recv_multipart())["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            num_connections += 1


def read_to_the_mark(publisher: Socket, subscriber: Socket) -> None:
    """Read what has arrived, and then what is sent now."""
    while True:
        publisher.send(MARK, zmq.NOBLOCK)
        while subscriber.poll(1):
            if subscriber.recv() == MARK:
                return


def main(which: str) -> None:
    sockets.ALIVE_IVL_MS, sockets.ALIVE_TIMEOUT_MS = HEARTBEAT_MS, TIMEOUT_MS
    sockets.MAX_RECEIVED, sockets.RECONNECT_IVL_MS = 4, 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    context: zmq.Context[Socket] = zmq.Context()
    publisher = publisher_of(context)
    endpoint = publisher.getsockopt_string(zmq.LAST_ENDPOINT)
    product = connect_subscriber(context, endpoint)
    product.subscribe(b"")
    publisher.recv()
    others = []
    for _ in range(3):  # each shows that the time for an answer has passed once more
        other, events = with_heartbeats(context, endpoint)
        publisher.recv()
        publish_until_reconnected(publisher, events)
        others.append(other)
    print("reads after the stall", flush=True)
    read_to_the_mark(publisher, product if which == "product" else others[0])
    print("has read all", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
