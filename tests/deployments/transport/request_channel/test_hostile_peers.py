"""Peers without the secret, and messages that no ingress sends."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
import zmq

from deployments.transport.request_channel import server as server_module
from deployments.transport.request_channel import sockets as sockets_module
from deployments.transport.request_channel.codec import decode_from_replica, encode, encode_request
from deployments.transport.request_channel.messages import Abort, Copy, Hello, Outputs, Status
from engine.kv.tiers.copies import CopyOrder
from engine.request import EngineRequest, KVSource
from engine.sampling_params import SamplingParams
from tests.deployments.transport.request_channel.peers import HOST, Peers, Replica, tokens_of
from tests.waiting import until_in_loop

REQUEST = EngineRequest("id", [1, 2], SamplingParams(max_tokens=5))


@contextmanager
def dealer(endpoint: str, identity: bytes = b"evil") -> Iterator[zmq.Socket[bytes]]:
    """A bare socket in the role of an ingress."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.connect(endpoint)
        yield socket


def count_received(replica: Replica, identity: bytes) -> list[bytes]:
    """Return a list to which the first frame of each message of a peer is added when the replica has handled it."""
    received: list[bytes] = []
    handle = replica.server._reader._on_message

    def record(frames: list[bytes]) -> None:
        handle(frames)
        if frames[0] == identity:
            received.append(frames[1])

    replica.server._reader._on_message = record
    return received


async def test_without_the_secret_nothing_is_served_or_answered(peers: Peers) -> None:
    replica, ingress = await peers.pair()
    copied: list[CopyOrder] = []
    replica.server._on_copy = copied.append
    received = count_received(replica, b"evil")
    with dealer(replica.server.address.requests) as evil:
        for secret in ("", "x" * 64, "\ud7ff", replica.server.address.secret[:-1]):
            evil.send(encode(Hello(secret, 0, 0, 0, False)))
            evil.send(encode_request(1, 1, REQUEST, []))
            evil.send(encode(Abort(2, 1)))
            evil.send(encode(Copy(b"1234", "", KVSource("tcp://10.0.0.1:5", "", 1), "drain")))
        await until_in_loop(lambda: len(received) == 16)
        assert copied == []
        assert len(replica.server._ingresses) == 1
        assert replica.server.num_requests == 0
        evil.send(encode(Hello(replica.server.address.secret, 0, 0, 0, False)))
        await until_in_loop(lambda: evil.poll(0))
        assert isinstance(decode_from_replica(evil.recv()), Status)  # the first answer is to the secret
    assert await tokens_of(ingress.submit([1], 5)) == replica.answer([1], 5)


async def test_malformed_messages_disturb_no_one(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    replica, ingress = await peers.pair()
    received = count_received(replica, b"evil")
    stream = ingress.submit([1], 100)
    secret = replica.server.address.secret
    bad = [
        b"",
        b"\x00" * 100,
        b"\x91" * 10_000,
        b"cos\nsystem\n(S'true'\ntR.",
        encode(Outputs(1, [], [], [], [])),
        encode(Hello(secret, 0, 0, 0, False)) + b"\0",
        encode(Hello(secret, 2**63, 2**63, 2**63, True)),
        encode(Abort(2**63, 2**63)),
    ]
    logger = logging.getLogger("ray.serve")
    logger.addHandler(caplog.handler)
    with dealer(replica.server.address.requests) as evil, dealer(replica.server.address.outputs, b"other") as other:
        for message in bad * 20:
            evil.send(message)
            evil.send_multipart([message, message])
            other.send(message)
        assert await tokens_of(stream) == replica.answer([1], 100)
        await until_in_loop(lambda: len(received) == 2 * len(bad) * 20)
    logger.removeHandler(caplog.handler)
    dropped = [record.message for record in caplog.records if "is dropped" in record.message]
    assert dropped == ["a message of the channel is dropped: Input data was truncated"]
    assert await tokens_of(ingress.submit([1], 5)) == replica.answer([1], 5)


async def test_a_peer_with_the_secret_cannot_confuse_the_numbers(peers: Peers) -> None:
    """A bug of an ingress, rather than an attack."""
    replica, ingress = await peers.pair()
    with dealer(replica.server.address.requests, b"odd") as odd:
        odd.send(encode(Hello(replica.server.address.secret, 0, 0, 0, False)))
        for number in (5, 1, 1, 3, 2**60):
            odd.send(encode_request(number, 1, REQUEST, []))
        odd.send(encode(Hello(replica.server.address.secret, 10**9, 10**9, 0, True)))
        await until_in_loop(lambda: replica.is_idle)
        assert await tokens_of(ingress.submit([1], 5)) == replica.answer([1], 5)
    await replica.tick_until_one_ingress_is_left()


async def test_ingresses_beyond_the_limit_are_refused(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_INGRESSES", 1)
    replica, _ = await peers.pair()
    with dealer(replica.server.address.requests) as second:
        second.send(encode(Hello(replica.server.address.secret, 0, 0, 0, False)))
        await until_in_loop(lambda: second.poll(0))
        status = decode_from_replica(second.recv())
    assert isinstance(status, Status)
    assert status.error == "this replica has closed the connection"


async def test_a_step_with_more_streams_than_tokens_is_refused(peers: Peers) -> None:
    _, ingress = await peers.pair()
    with pytest.raises(ValueError, match="shorter"):
        ingress.links["r1"]._queue_outputs(Outputs(1, [1, 2], [5], [], []))


async def test_a_message_over_the_limit_closes_only_its_connection(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets_module, "MAX_REQUEST_BYTES", 10_000)
    replica, ingress = await peers.pair()
    with dealer(replica.server.address.requests) as evil:
        with evil.get_monitor_socket(zmq.EVENT_DISCONNECTED) as events:
            evil.send(bytes(20_000))
            await until_in_loop(lambda: events.poll(0))
            evil.disable_monitor()
        assert await tokens_of(ingress.submit([1], 5)) == replica.answer([1], 5)


async def test_a_peer_that_is_no_zeromq_is_ignored(peers: Peers) -> None:
    replica, ingress = await peers.pair()
    with socket.create_connection((HOST, urlsplit(replica.server.address.requests).port or 0)) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        assert await tokens_of(ingress.submit([1], 5)) == replica.answer([1], 5)


async def test_a_replica_that_sends_something_else_is_lost(peers: Peers) -> None:
    """Something else may have got its port."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    replica = peers.replica()
    ingress = peers.ingress()
    with context, context.socket(zmq.ROUTER) as fake:
        fake.setsockopt(zmq.LINGER, 0)
        port = fake.bind_to_random_port(f"tcp://{HOST}")
        address = replica.server.address
        other = type(address)(f"tcp://{HOST}:{port}", address.outputs, address.secret)
        ingress.links.set_replicas({"r1": other.metadata})
        await until_in_loop(lambda: fake.poll(0))
        identity, *_ = fake.recv_multipart()  # a Hello for each of its two connections, in one message or two
        link = ingress.links["r1"]
        requests = link._connection._requests
        fake.send_multipart([identity, b"surprise"])
        await until_in_loop(lambda: requests.is_closed)
        assert not ingress.links.ready
