"""Connections between live peers break: no stream notices. Peers that die or vanish are noticed at once."""

from __future__ import annotations

import asyncio
import random
from operator import gt

import pytest

from deployments.transport.request_channel import replica_connection
from deployments.transport.request_channel import server as server_module
from deployments.transport.request_channel import sockets as sockets_module
from deployments.transport.request_channel.address import ReplicaAddress
from deployments.transport.request_channel.codec import encode
from deployments.transport.request_channel.messages import Hello
from engine.errors import EngineDeadError
from tests.deployments.transport.request_channel.peers import Ingress, Peers, Proxy, in_lockstep, tokens_of
from tests.engine.async_streams import Gate
from tests.waiting import until_in_loop


class Disturber:
    """Cuts connections at random, each after some pieces of data, and holds up others until the next piece of any."""

    def __init__(self, proxies: list[Proxy], rng: random.Random) -> None:
        self._proxies = proxies
        self._rng = rng
        self._pieces_left = 0
        self.is_active = True
        for proxy in proxies:
            proxy.on_data = self._on_data

    def _on_data(self) -> None:
        if not self.is_active:
            return
        for proxy in self._proxies:
            proxy.is_open.set()
        self._pieces_left -= 1
        if self._pieces_left > 0:
            return
        self._pieces_left = self._rng.randint(5, 40)
        self._rng.choice(self._proxies).cut()
        if self._rng.random() < 0.5:
            held = self._rng.choice(self._proxies)
            held.is_open.clear()
            asyncio.get_running_loop().call_later(0.005, held.is_open.set)  # no other data may come


@pytest.mark.parametrize("seed", range(4))
async def test_every_stream_gets_exactly_its_tokens_through_a_line_that_breaks(peers: Peers, seed: int) -> None:
    rng = random.Random(seed)
    replica = peers.replica(num_blocks=1024, max_num_seqs=64)
    in_lockstep(replica)
    ingresses, proxies = [], []
    for _ in range(2):
        address, between = await peers.proxied(replica.server.address)
        proxies += between
        ingresses.append(peers.ingress())
        await ingresses[-1].join(r1=address)
    disturber = Disturber(proxies, rng)

    async def client(ingress: Ingress, number: int) -> None:
        for turn in range(6):
            prompt = [number, turn, 1, 2]
            stream = ingress.submit(prompt, 40, logprobs=rng.choice([None, 1]))
            if rng.random() < 0.2:
                await stream.wait()
                ingress.links["r1"].cancel(stream)
            else:
                assert await tokens_of(stream) == replica.answer(prompt, 40)

    await asyncio.gather(*(client(ingresses[number % 2], number) for number in range(40)))
    disturber.is_active = False
    assert sum(proxy.num_connections for proxy in proxies) > 10, "nothing was cut"
    await until_in_loop(lambda: replica.is_idle)
    for ingress in ingresses:
        link = ingress.links["r1"]
        await until_in_loop(lambda link=link: not link.num_streams and not len(link._connection._outbox))  # type: ignore[misc]
    await until_in_loop(lambda: all(not peer.connection._outbox.num_bytes or peer.connection.acknowledged ==
                            peer.connection.last_number for peer in replica.server._ingresses.values()))  # fmt: skip


@pytest.mark.parametrize("which", [0, 1])
async def test_the_last_output_of_a_stream_survives_a_break(peers: Peers, which: int) -> None:
    """No later message would show the gap."""
    replica = peers.replica()
    address, proxies = await peers.proxied(replica.server.address)
    ingress = peers.ingress()
    await ingress.join(r1=address)
    gate = Gate(replica.runner)
    stream = ingress.submit([1], 5)
    await stream.wait()
    proxies[which].cut()
    gate.opened.set()
    await until_in_loop(lambda: replica.engine.stats().num_running == 0)
    assert await tokens_of(stream) == replica.answer([1], 5)


async def test_outputs_that_are_lost_without_a_break_are_sent_again(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, ingress = await peers.pair()
    arrive = ingress.links["r1"]._connection._on_outputs
    accept = ingress.links["r1"]._connection._arrivals.accept
    dropped: list[int] = []

    def lossy(number: int) -> bool:
        if number in (2, 5) and number not in dropped:
            dropped.append(number)
            return False
        return accept(number)

    monkeypatch.setattr(ingress.links["r1"]._connection._arrivals, "accept", lossy)
    assert arrive is not None
    assert await tokens_of(ingress.submit([1], 5)) == replica.answer([1], 5)
    assert dropped == [2, 5]


async def test_a_replica_that_is_killed_fails_its_streams_at_once(peers: Peers) -> None:
    """No tick is needed to notice it."""
    replica = peers.replica()
    address, proxies = await peers.proxied(replica.server.address)
    ingress = peers.ingress(tick_s=1e6)
    await ingress.join(r1=address)
    gate = Gate(replica.runner)
    streams = [ingress.submit([i], 50) for i in range(5)]
    await streams[0].wait()
    for proxy in proxies:
        await proxy.refuse()
    for stream in streams:
        with pytest.raises(EngineDeadError, match="does not listen") as caught:
            await tokens_of(stream)
        assert caught.value.replica == "r1"
    assert not ingress.links.ready
    gate.opened.set()
    await until_in_loop(lambda: replica.is_idle)  # it was not the replica that died
    for proxy in proxies:
        await proxy.listen()
    ingress.links["r1"].tick()
    await until_in_loop(lambda: ingress.links.ready)
    assert await tokens_of(ingress.submit([1], 5)) == replica.answer([1], 5)


async def test_a_replica_that_dies_before_its_connection_is_back_fails_its_streams(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: only the break was a reason to look whether it still listens, and the streams hung."""
    monkeypatch.setattr(sockets_module, "RECONNECT_IVL_MS", 10_000)
    replica = peers.replica()
    address, proxies = await peers.proxied(replica.server.address)
    ingress = peers.ingress()
    await ingress.join(r1=address)
    gate = Gate(replica.runner)
    stream = ingress.submit([1], 50)
    await stream.wait()
    for proxy in proxies:
        proxy.cut()
    connection = ingress.links["r1"]._connection
    await until_in_loop(
        lambda: connection._num_broken == 2 and connection._probe is not None and connection._probe.done()
    )  # it was found
    assert connection.is_ready
    for proxy in proxies:
        await proxy.refuse()
    with pytest.raises(EngineDeadError, match="does not listen"):
        await tokens_of(stream)
    gate.opened.set()


async def test_an_ingress_that_vanishes_leaves_nothing(peers: Peers) -> None:
    replica, ingress = await peers.pair()
    gate = Gate(replica.runner)
    survivor = peers.ingress()
    await survivor.join(r1=replica.server.address)
    kept = survivor.submit([1], 30)
    await kept.wait()
    for number in range(50):
        ingress.submit([number], 100)
    await until_in_loop(lambda: replica.server.num_requests == 51)
    ingress.links.close()
    gate.opened.set()
    assert await tokens_of(kept) == replica.answer([1], 30)
    await replica.tick_until_one_ingress_is_left()
    await until_in_loop(lambda: replica.is_idle)
    assert not replica.engine._readers


async def test_five_hundred_clients_that_vanish_leave_no_block_task_or_buffer(peers: Peers) -> None:
    replica, ingress = await peers.pair(num_blocks=2048)
    tasks = len(asyncio.all_tasks())
    rng = random.Random(1)

    async def client(number: int) -> None:
        stream = ingress.submit([number % 50, number], 60) if number % 64 < 50 else ingress.submit([number % 50], 60)
        for _ in range(rng.randrange(6)):
            await stream.wait()
            output = stream.take()
            assert output is not None
            if output.is_last:
                break
        ingress.links["r1"].cancel(stream)

    await asyncio.gather(*(client(number % 60) for number in range(500)))
    await until_in_loop(lambda: replica.is_idle)
    link = ingress.links["r1"]
    assert not link._streams
    await until_in_loop(lambda: not len(link._connection._outbox))
    (served,) = replica.server._ingresses.values()
    await until_in_loop(lambda: served.connection.acknowledged == served.connection.last_number)
    assert len(asyncio.all_tasks()) <= tasks


async def test_a_replica_forgets_an_ingress_that_was_silent_and_the_ingress_starts_again(peers: Peers) -> None:
    replica, ingress = await peers.pair()
    gate = Gate(replica.runner)
    stream = ingress.submit([1], 50)
    await stream.wait()
    await until_in_loop(lambda: not len(ingress.links["r1"]._connection._outbox))
    for identity in list(replica.server._ingresses):
        replica.server._remove(identity, "a test")
    gate.opened.set()
    with pytest.raises(EngineDeadError, match="closed the connection"):
        await tokens_of(stream)
    await until_in_loop(lambda: ingress.links.ready)
    assert await tokens_of(ingress.submit([1], 5)) == replica.answer([1], 5)


@pytest.mark.parametrize("answered", [False, True])
async def test_a_hello_that_was_on_the_way_does_not_revive_a_closed_connection(peers: Peers, answered: bool) -> None:
    """Regression: the replica took it for a new connection, and waited for messages that it had acknowledged before."""
    replica = peers.replica()
    ingress = peers.ingress(tick_s=1e6)  # the test says hello
    await ingress.join(r1=replica.server.address)
    gate, link = Gate(replica.runner), ingress.links["r1"]
    stream = ingress.submit([1], 50)
    if answered:
        await stream.wait()
    link._connection._say_hello()
    await until_in_loop(lambda: not len(link._connection._outbox))
    for identity in list(replica.server._ingresses):
        replica.server._remove(identity, "a test")
    link._connection._requests.send(encode(Hello(link.address.secret, 0, 0, 0, False)))
    link._connection._say_hello()
    gate.opened.set()
    with pytest.raises(EngineDeadError, match="closed the connection"):
        await tokens_of(stream)
    link.tick()
    await until_in_loop(lambda: ingress.links.ready)
    assert await tokens_of(ingress.submit([1], 5)) == replica.answer([1], 5)


async def test_what_an_ingress_does_not_receive_is_bounded(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests arrive, but its connection for outputs passes nothing on."""
    monkeypatch.setattr(server_module, "MAX_KEPT_BYTES", 500)
    replica = peers.replica()
    address, (requests, outputs) = await peers.proxied(replica.server.address)
    outputs.is_open.clear()
    ingress = peers.ingress()
    await ingress.join(r1=address)
    stream = ingress.submit([1], 200)
    with pytest.raises(EngineDeadError, match="closed the connection"):
        await tokens_of(stream)
    await until_in_loop(lambda: replica.is_idle)
    assert requests.num_connections


async def test_a_link_with_too_many_bytes_on_the_way_takes_no_request(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_connection, "MAX_KEPT_BYTES", 500)
    replica, ingress = await peers.pair()
    stream = ingress.submit([1] * 200, 5)
    assert not ingress.links.ready
    await until_in_loop(lambda: ingress.links.ready)  # it is acknowledged
    assert await tokens_of(stream) == replica.answer([1] * 200, 5)


async def test_a_replica_that_is_not_listed_keeps_its_link_until_its_streams_end(peers: Peers) -> None:
    replica, ingress = await peers.pair()
    gate = Gate(replica.runner)
    stream = ingress.submit([1], 50)
    await stream.wait()
    link = ingress.links["r1"]
    ingress.links.set_replicas({})
    await until_in_loop(lambda: not len(ingress.links))
    ingress.links.set_replicas({"r1": replica.server.address.metadata})
    await until_in_loop(lambda: len(ingress.links))
    assert ingress.links["r1"] is link
    ingress.links.set_replicas({"r2": {"block_size": 4}})  # of a version without a channel
    gate.opened.set()
    assert await tokens_of(stream) == replica.answer([1], 50)
    await until_in_loop(lambda: not ingress.links._retired)
    assert ingress.links.ready == []


async def test_a_list_of_replicas_that_comes_at_the_end_is_ignored_after_it() -> None:
    ingress = Ingress()
    ingress.links.set_replicas({})
    ingress.links.close()
    await asyncio.sleep(0)  # the event loop takes the list
    assert ingress.num_changes == 0


async def test_an_address_that_is_none_is_ignored(peers: Peers) -> None:
    ingress = peers.ingress()
    good = "tcp://127.0.0.1:1"
    for number, bad in enumerate(("tcp://localhost:1", "ipc:///tmp/x", "tcp://127.0.0.1:99999")):
        for requests, outputs in ((bad, bad), (good, bad)):
            before = len(ingress.links._rejected)
            ingress.links.set_replicas({f"{number}{requests}": ReplicaAddress(requests, outputs, "secret").metadata})
            await until_in_loop(lambda before=before: len(ingress.links._rejected) > before)
            assert not len(ingress.links)


async def test_links_that_are_lost_while_their_connection_breaks_stop_no_other(peers: Peers) -> None:
    """Regression: ZeroMQ's I/O thread waited forever for the closed reader of a connection's events."""
    replica, other = peers.replica(), peers.replica()
    address, proxies = await peers.proxied(replica.server.address)
    ingress = peers.ingress()
    await ingress.join(r1=address, r2=other.server.address)
    link = ingress.links["r1"]
    for turn in range(60):
        before = [proxy.num_connections for proxy in proxies]
        for proxy in proxies:
            proxy.cut()
        for _ in range(turn % 5 * 10):  # at different moments of ZeroMQ's thread
            await asyncio.sleep(0)
        link._connection._lose("a test")
        link._connection._open()
        await until_in_loop(lambda before=before: all(map(gt, [proxy.num_connections for proxy in proxies], before)))  # type: ignore[misc]
    assert await tokens_of(ingress.submit([3], 5, replica="r2")) == other.answer([3], 5)
