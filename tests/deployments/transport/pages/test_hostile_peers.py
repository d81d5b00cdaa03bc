"""Bytes that no peer of this version sends: they end their own connection, and nothing else."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.transport.pages import conversation as conversation_module
from deployments.transport.pages import server as server_module
from deployments.transport.pages.messages import (
    MAX_HELLO_BYTES,
    VERSION,
    Blocks,
    End,
    FromClient,
    FromServer,
    Hello,
    PageMessageError,
    Pull,
    Refusal,
    Welcome,
    decode_from_client,
    decode_from_server,
    encode,
)
from engine.kv.prefix_hash import pack_tokens
from tests.deployments.transport.pages.fakes import FORMAT, HOST, PROMPT, Lender, Pair, pair
from tests.deployments.transport.pages.test_transfer import random_pages, released, sink_for
from tests.waiting import until


def framed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def connect(both: Pair) -> socket.socket:
    parts = urlsplit(both.server.address.endpoint)
    return socket.create_connection((parts.hostname, parts.port))


def hello(both: Pair) -> Hello:
    return Hello(VERSION, both.server.address.secret, FORMAT)


def pull(num_blocks: int = 10) -> Pull:
    return Pull(pack_tokens(PROMPT), "", 0, num_blocks, 10_000)


def works(both: Pair) -> bool:
    """Whether another client is served, and all leases end."""
    pages = both.lender.pages
    return both.fetch(sink_for(pages)) is None and released(both)


def read_to_end(client: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):  # the server has left bytes unread
        while more := client.recv(2**16):
            data += more
    return data


MALFORMED: dict[str, Callable[[Pair], bytes]] = {
    "nothing that is msgpack": lambda both: framed(b"\xc1" * 100),
    "a server's message": lambda both: framed(encode(Welcome())),
    "a Pull before the Hello": lambda both: framed(encode(pull())),
    "too long a Hello": lambda both: struct.pack("<I", MAX_HELLO_BYTES + 1),
    "four gigabytes": lambda both: b"\xff" * 4,
    "bytes after a message": lambda both: framed(encode(hello(both)) + b"\0"),
    "a second Hello": lambda both: framed(encode(hello(both))) * 2,
    "half a token": lambda both: framed(encode(hello(both))) + framed(encode(Pull(b"123", "", 0, 1, 1000))),
    "a negative block": lambda both: framed(encode(hello(both))) + framed(encode(Pull(b"1234", "", -1, 1, 1000))),
    "too long a prompt": lambda both: framed(encode(hello(both))) + struct.pack("<I", 2**20),
    "HTTP": lambda both: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_input_ends_the_connection(case: str) -> None:
    with pair(Lender(random_pages(10))) as both, connect(both) as client:
        client.sendall(MALFORMED[case](both))
        read_to_end(client)
        until(lambda: both.rejections == {("malformed",): 1}, "it is counted")
        assert works(both)


@pytest.mark.parametrize("numbers", [(2**63, 1), (0, 2**64 - 1), (9, 2**63), (10, 1), (0, 0)])
def test_blocks_that_no_prompt_has(numbers: tuple[int, int]) -> None:
    with pair(Lender(random_pages(10))) as both, connect(both) as client:
        client.sendall(framed(encode(hello(both))) + framed(encode(Pull(pack_tokens(PROMPT), "", *numbers, 1000))))
        client.shutdown(socket.SHUT_WR)
        assert encode(End("")) in read_to_end(client)
        assert works(both)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for decode in (decode_from_client, decode_from_server):
        try:
            message = decode(data)
        except PageMessageError:
            continue
        assert encode(message)


counts = st.integers(0, 2**64 - 1)
from_client = st.one_of(
    st.builds(Hello, st.integers(-(2**63), 2**63), st.text(max_size=20), st.dictionaries(st.text(), st.text())),
    st.builds(Pull, st.binary(max_size=64), st.text(max_size=20), counts, counts, counts),
)
from_server = st.one_of(
    st.just(Welcome()),
    st.builds(Refusal, st.text(max_size=50)),
    st.builds(Blocks, counts, st.lists(st.lists(counts, max_size=3)), st.lists(st.lists(st.none() | counts))),
    st.builds(End, st.text(max_size=50)),
)


@settings(max_examples=50)
@given(from_client, from_server)
def test_messages_survive_the_wire(client: FromClient, server: FromServer) -> None:
    assert decode_from_client(encode(client)) == client
    assert decode_from_server(encode(server)) == server


@settings(max_examples=50)
@given(st.lists(st.one_of(from_client.map(encode), from_server.map(encode), st.binary(max_size=50)), max_size=4))
def test_no_sequence_of_messages_disturbs_the_server(messages: list[bytes]) -> None:
    pages = random_pages(4)
    with pair(Lender(pages)) as both, connect(both) as client:
        with contextlib.suppress(OSError):  # the server has closed the connection
            client.sendall(framed(encode(hello(both))) + b"".join(map(framed, messages)))
            client.shutdown(socket.SHUT_WR)
        read_to_end(client)
        assert both.fetch(sink_for(pages)) is None


def test_clients_that_say_nothing_or_take_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_module, "HELLO_S", 0.05)
    monkeypatch.setattr(conversation_module, "STALL_S", 0.05)
    large = random_pages(10, [2**22])
    with pair(Lender(large)) as both, connect(both) as silent, connect(both) as slow:
        read_to_end(silent)
        monkeypatch.undo()
        until(lambda: both.rejections == {("stalled",): 2}, "it is counted")
        del slow
    monkeypatch.setattr(conversation_module, "STALL_S", 0.05)
    with pair(Lender(large)) as both, connect(both) as slow:
        slow.sendall(framed(encode(hello(both))) + framed(encode(pull())))
        until(lambda: both.rejections == {("stalled",): 1}, "it is counted")
        assert released(both)


def test_too_many_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 2)
    with pair(Lender(random_pages(10))) as both, connect(both) as first, connect(both):
        until(lambda: both.server.num_connections == 2, "both are open")
        with connect(both) as third:
            assert read_to_end(third) == b""
        assert both.rejections == {("connections",): 1}
        first.close()
        until(lambda: both.server.num_connections == 1, "one has gone")
        assert works(both)


# --- servers ---------------------------------------------------------------------------------------------------------


@contextmanager
def scripted(*answers: bytes) -> Iterator[str]:
    """Yield the endpoint of a server that sends the same bytes to everyone, and then nothing."""
    listening = socket.create_server((HOST, 0))
    accepted: list[socket.socket] = []

    def serve() -> None:
        try:
            connection, _ = listening.accept()
            accepted.append(connection)
            connection.sendall(b"".join(answers))
        except OSError:
            return

    thread = Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"tcp://{HOST}:{listening.getsockname()[1]}"
    finally:
        thread.join()
        for each in (listening, *accepted):
            each.close()


WELCOME = framed(encode(Welcome()))
SIZES = [4096, 96, 40]
ANSWERS: dict[str, list[bytes]] = {
    "no Welcome": [framed(encode(End("")))],
    "garbage": [b"\xff" * 64],
    "garbage for blocks": [WELCOME, b"\0" * 64],
    "a Welcome for blocks": [WELCOME, WELCOME],
    "another first block": [WELCOME, framed(encode(Blocks(1, [SIZES], [[0, 0, 0]])))],
    "no blocks": [WELCOME, framed(encode(Blocks(0, [], [])))],
    "too many blocks": [WELCOME, framed(encode(Blocks(0, [SIZES] * 11, [[0, 0, 0]] * 11)))],
    "too few checksums": [WELCOME, framed(encode(Blocks(0, [SIZES] * 2, [[0, 0, 0]])))],
    "checksums of too many kinds": [WELCOME, framed(encode(Blocks(0, [SIZES], [[0] * 4]))), bytes(sum(SIZES))],
    "too many kinds": [WELCOME, framed(encode(Blocks(0, [[*SIZES, 1]], [[0] * 4])))],
    "too few kinds": [WELCOME, framed(encode(Blocks(0, [SIZES[:2]], [[0] * 2])))],
    "bytes of a page that it lacks": [WELCOME, framed(encode(Blocks(0, [SIZES], [[0, None, 0]]))), bytes(sum(SIZES))],
    "a checksum without bytes": [WELCOME, framed(encode(Blocks(0, [[4096, 0, 40]], [[0] * 3]))), bytes(4136)],
    "a large page": [WELCOME, framed(encode(Blocks(0, [[4097, 96, 40]], [[0] * 3])))],
    "an enormous page": [WELCOME, framed(encode(Blocks(0, [[2**63, 96, 40]], [[0] * 3])))],
    "an overlong message": [WELCOME, struct.pack("<I", 2**31)],
    "other bytes": [WELCOME, framed(encode(Blocks(0, [SIZES], [[1, 2, 3]]))), bytes(sum(SIZES))],
}


@pytest.mark.parametrize("case", ANSWERS)
def test_a_hostile_server_costs_one_fetch(case: str) -> None:
    pages = random_pages(10)
    with pair(Lender(pages)) as both, scripted(*ANSWERS[case]) as endpoint:
        sink = sink_for(pages)
        assert both.fetch(sink, endpoint=endpoint) == ("checksum" if case == "other bytes" else "io")
        assert sink.done == []
        assert not both.client.may_help(both.source(endpoint=endpoint))
        assert works(both)


@pytest.mark.parametrize("endpoint", ["tcp://localhost:80", "tcp://0.0.0.0:80", "ipc:///tmp/x", "tcp://127.0.0.1:0"])
def test_endpoints_that_are_not_one_host_are_not_connected_to(endpoint: str) -> None:
    with pair(Lender(random_pages(10))) as both:
        assert both.fetch(sink_for(random_pages(10)), endpoint=endpoint) == "io"
