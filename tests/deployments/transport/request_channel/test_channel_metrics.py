"""What the metrics of the channel count: connections that broke, gaps, and replicas that were lost."""

from __future__ import annotations

import pytest

from deployments.observability.ingress_metrics import (
    CHANNEL_GAPS,
    CHANNEL_LOST_REPLICAS,
    CHANNEL_RECONNECTIONS,
    ingress_recorder,
)
from engine.errors import EngineDeadError
from tests.deployments.transport.request_channel.peers import Peers, tokens_of
from tests.engine.async_streams import Gate
from tests.waiting import until_in_loop


def _counts() -> dict[str, float]:
    """Return the counters by name and label."""
    metrics = (CHANNEL_GAPS, CHANNEL_LOST_REPLICAS, CHANNEL_RECONNECTIONS)
    return {
        " ".join((sample.metric.name, *sample.labels)): sample.value
        for sample in ingress_recorder().snapshot()
        if sample.metric in metrics
    }


def _since(before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in _counts().items() if value != before[name]}


async def test_each_connection_of_a_live_replica_that_is_made_again_counts(peers: Peers) -> None:
    replica = peers.replica()
    address, proxies = await peers.proxied(replica.server.address)
    ingress = peers.ingress()
    await ingress.join(r1=address)
    before = _counts()
    for number in range(1, 4):
        for proxy in proxies:
            proxy.cut()
        await until_in_loop(lambda number=number: _since(before).get("channel_reconnections") == 2 * number)  # type: ignore[misc]
    assert await tokens_of(ingress.submit([1], 5)) == replica.answer([1], 5)
    assert _since(before) == {"channel_reconnections": 6}


async def test_a_replica_that_is_lost_counts_once_and_only_with_streams(peers: Peers) -> None:
    replica = peers.replica()
    address, proxies = await peers.proxied(replica.server.address)
    ingress = peers.ingress()
    await ingress.join(r1=address)
    before, gate = _counts(), Gate(replica.runner)
    streams = [ingress.submit([number], 50) for number in range(3)]
    await streams[0].wait()
    for proxy in proxies:
        await proxy.refuse()
    for stream in streams:
        with pytest.raises(EngineDeadError):
            await tokens_of(stream)
    assert _since(before) == {"channel_lost_replicas": 1}
    for proxy in proxies:
        await proxy.listen()
    await until_in_loop(lambda: ingress.links.ready)
    for proxy in proxies:
        await proxy.refuse()
    await until_in_loop(lambda: not ingress.links.ready)
    assert _since(before) == {"channel_lost_replicas": 1}
    gate.opened.set()


async def test_a_gap_counts_by_what_is_missing(peers: Peers) -> None:
    replica, ingress = await peers.pair()
    link, before = ingress.links["r1"], _counts()
    accept, lost = link._connection._arrivals.accept, [1]

    def lossy(number: int) -> bool:
        if number in lost:
            lost.remove(number)
            return False
        return accept(number)

    link._connection._arrivals.accept = lossy  # type: ignore[method-assign]
    assert await tokens_of(ingress.submit([1], 5)) == replica.answer([1], 5)
    assert _since(before) == {"channel_gaps outputs": 1}
    send = link._connection.send
    link._connection.send = lambda data: None  # type: ignore[method-assign]
    stream = ingress.submit([2], 5)
    link._connection.send = send  # type: ignore[method-assign]
    assert await tokens_of(stream) == replica.answer([2], 5)
    assert _since(before) == {"channel_gaps outputs": 1, "channel_gaps requests": 1}
