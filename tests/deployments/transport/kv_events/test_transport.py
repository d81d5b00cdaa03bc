"""Publishers and subscribers on real sockets: events, snapshots and loads arrive."""

from __future__ import annotations

import threading
import time

import pytest

from deployments.observability.ingress_metrics import KV_INDEX_GAPS, KV_INDEX_LAG
from tests.deployments.kv_listener import CLEARED, batch, load, removed, stored
from tests.deployments.transport.kv_events.transport import (
    Transport,
)


def test_a_new_subscriber_gets_a_snapshot_then_every_change(transport: Transport) -> None:
    publisher, ingress = transport.publisher(), transport.ingress()
    publisher.publish_events(batch(0, stored(1, 2, 3)))
    publisher.publish_events(batch(1, removed(2)))
    ingress.set_endpoints({"r1": publisher.endpoint})
    ingress.wait_for_blocks("r1", 1, 3)
    publisher.publish_events(batch(2, (*stored(4), *removed(1, 4))))
    publisher.publish_events(batch(3, (*removed(3), *stored(3, 5))))
    ingress.wait_for_blocks("r1", 3, 5)
    publisher.publish_events(batch(4, (*CLEARED, *stored(6))))
    ingress.wait_for_blocks("r1", 6)
    assert ingress.known.count("replaced", "r1") == 1
    assert ingress.metric(KV_INDEX_GAPS) == 0
    assert 0 <= ingress.metric(KV_INDEX_LAG) < 60


def test_many_steps_arrive_in_order_without_a_gap(transport: Transport) -> None:
    publisher, ingress = transport.publisher(), transport.ingress()
    ingress.join(publisher)
    for number in range(500):
        publisher.publish_events(batch(number, (*stored(number + 3, 1000), *removed(number, 1000))))
    ingress.wait_for_blocks("r1", 500, 501, 502)
    assert ingress.metric(KV_INDEX_GAPS) == 0


def test_queued_prompts_are_announced_to_every_ingress(transport: Transport) -> None:
    publisher, ingresses = transport.publisher(), [transport.ingress(), transport.ingress()]
    for ingress in ingresses:
        ingress.join(publisher)
    publisher.publish_awaited([1, 2, 2**64 - 1])
    for ingress in ingresses:
        ingress.known.wait_count("awaited", "r1")
        assert ingress.known.awaiting["r1"] == [[1, 2, 2**64 - 1]]
        assert ingress.known.blocks["r1"] == set()  # not computed yet
    with pytest.raises(OverflowError):
        publisher.publish_awaited([2**64])


def test_ingresses_that_join_at_once_get_the_same_blocks(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = transport.publisher()
    publisher.publish_events(batch(0, stored(*range(20_000))))
    ingresses = [transport.ingress() for _ in range(16)]
    for ingress in ingresses:
        ingress.set_endpoints({"r1": publisher.endpoint})
    for number in range(1, 51):
        publisher.publish_events(batch(number, (*removed(number), *stored(10**6 + number))))
    for ingress in ingresses:
        ingress.wait_for_blocks("r1", 0, *range(51, 20_000), *range(10**6 + 1, 10**6 + 51))


def test_replicas_with_a_common_name_prefix_are_kept_apart(transport: Transport) -> None:
    names = ["r1", "r10", "r1/", "r"]
    publishers = [transport.publisher(name) for name in names]
    ingress = transport.ingress()
    ingress.join(*publishers, names=names)
    for index, publisher in enumerate(publishers):
        publisher.publish_events(batch(0, stored(index)))
    for index, name in enumerate(names):
        ingress.wait_for_blocks(name, index)


def test_the_load_is_sent_at_once_and_repeated(transport: Transport) -> None:
    publisher, ingress = transport.publisher(heartbeat_s=0.02), transport.ingress()
    ingress.join(publisher)
    assert not ingress.known.reports["r1"]
    publisher.publish_load(load(7))
    ingress.known.wait_count("report", "r1", 10)
    assert {report for report, _ in ingress.known.reports["r1"]} == {load(7)}
    times = [when for _, when in ingress.known.reports["r1"]]
    assert times == sorted(times)
    assert times[-1] <= time.monotonic()
    publisher.publish_load(load(8))
    ingress.known.wait(lambda: ingress.known.reports["r1"][-1][0] == load(8))


def test_a_new_load_does_not_wait_for_the_heartbeat(transport: Transport) -> None:
    publisher, ingress = transport.publisher(heartbeat_s=3600), transport.ingress(silence_s=3600)
    ingress.join(publisher)
    for number in range(5):
        publisher.publish_load(load(number))
        ingress.known.wait(lambda n=number: [report for report, _ in ingress.known.reports["r1"]][-1:] == [load(n)])  # type: ignore[misc]


def test_close_ends_the_threads_and_is_idempotent(transport: Transport) -> None:
    publisher, ingress, idle = transport.publisher(), transport.ingress(), transport.ingress()
    ingress.set_endpoints({"r1": publisher.endpoint, "unreachable": "tcp://127.0.0.1:1"})
    ingress.known.wait_count("replaced", "r1")
    for peer in (idle, ingress, publisher, publisher, ingress):
        peer.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-")]
    publisher.publish_events(batch(0, stored(1)))
    publisher.publish_load(load())
    ingress.set_endpoints({})
