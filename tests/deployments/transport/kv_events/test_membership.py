"""Replicas that join, leave and restart, and the addresses that are accepted."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from deployments.observability.ingress_metrics import KV_INDEX_DROPPED
from deployments.transport.kv_events.publisher import KVEventPublisher
from deployments.transport.kv_events.sockets import url_host
from engine.errors import ConfigError
from tests.deployments.kv_listener import Known, batch, load, stored
from tests.deployments.transport.kv_events.transport import (
    HOST,
    Ingress,
    PausedListener,
    Transport,
    reuse_port,
)
from tests.waiting import HANG_S, until


def test_a_restart_at_the_same_endpoint_is_another_generation(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, ingress = transport.publisher(), transport.ingress()
    first.publish_events(batch(0, stored(1, 2)))
    ingress.join(first)
    first.close()
    reuse_port(first.endpoint, monkeypatch)
    second = transport.publisher()
    second.publish_events(batch(0, stored(7), run_id=2))
    ingress.wait_for_blocks("r1", 7)
    assert ingress.known.count("cleared", "r1") == 1
    second.publish_events(batch(1, stored(8), run_id=2))
    ingress.wait_for_blocks("r1", 7, 8)


def test_an_engine_restart_clears_at_once(transport: Transport) -> None:
    publisher, ingress = transport.publisher(), transport.ingress()
    publisher.publish_events(batch(0, stored(1, 2)))
    ingress.join(publisher)
    publisher.publish_events(batch(0, stored(5), run_id=2))
    publisher.publish_events(batch(1, stored(6), run_id=2))
    ingress.wait_for_blocks("r1", 5, 6)
    assert ingress.known.count("cleared", "r1") == 1


def test_a_replica_on_a_reused_port_is_not_mistaken_for_the_old_one(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, ingress = transport.publisher("r1"), transport.ingress(silence_s=0.5)
    first.publish_events(batch(0, stored(1)))
    ingress.join(first)
    first.close()
    reuse_port(first.endpoint, monkeypatch)
    second = transport.publisher("r2")
    second.publish_events(batch(0, stored(66)))
    second.publish_load(load(66))
    other = transport.ingress()
    other.join(second, names=["r2"])
    ingress.known.wait_count("events_lost", "r1")
    assert ingress.known.blocks["r1"] == {1}
    assert not ingress.known.reports["r1"]
    ingress.set_endpoints({"r2": second.endpoint})
    ingress.wait_for_blocks("r2", 66)


def test_messages_of_a_removed_replica_are_not_applied(transport: Transport) -> None:
    publisher, ingress = transport.publisher(), transport.ingress(paused := PausedListener())
    ingress.join(publisher)
    for number in range(100):
        publisher.publish_events(batch(number, stored(number)))
    assert paused.is_paused.wait(HANG_S)
    until(lambda: not publisher._batches, "all batches were sent")
    ingress.set_endpoints({})
    paused.go_on.set()
    until(lambda: not ingress.subscriber._subscriptions, "nothing is subscribed to")
    assert paused.blocks["r1"] == {0}, "more than the message in progress was applied"


def test_a_replica_that_is_listed_again_gets_a_new_snapshot(transport: Transport) -> None:
    publisher, ingress = transport.publisher(), transport.ingress()
    publisher.publish_events(batch(0, stored(1)))
    ingress.join(publisher)
    ingress.set_endpoints({})
    ingress.set_endpoints({"r1": publisher.endpoint})
    ingress.known.wait_count("replaced", "r1", 2)
    ingress.set_endpoints({"r1": publisher.endpoint})  # the same list: no effect
    publisher.publish_events(batch(1, stored(2)))
    ingress.wait_for_blocks("r1", 1, 2)
    assert ingress.known.count("replaced", "r1") == 2


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "tcp://",
        "tcp://*:5555",
        "tcp://0.0.0.0:5",
        "tcp://[::]:5",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:70000",
        "ipc:///tmp/x",
        "inproc://x",
        "tcp://some.host:5",
        "tcp://127.0.0.1:5;tcp://127.0.0.1:6",
        "tcp://[::ffff:0.0.0.0]:5",
    ],
)
def test_an_invalid_endpoint_is_ignored(transport: Transport, endpoint: str) -> None:
    publisher, ingress = transport.publisher(), transport.ingress()
    for _ in range(2):
        ingress.set_endpoints({"bad": endpoint, "r1": publisher.endpoint})
    ingress.known.wait_count("replaced", "r1")
    assert ingress.metric(KV_INDEX_DROPPED, "malformed") == 1
    assert not ingress.known.count("events_lost", "bad")


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "::", "", "[::]", "0", "::ffff:0.0.0.0", "eth0", "192.0.2.1", "224.0.0.1"]
)
def test_a_publisher_binds_only_to_an_address_of_its_node(transport: Transport, host: str) -> None:
    with pytest.raises(ConfigError, match="host="):
        KVEventPublisher("r1", host)


@pytest.mark.parametrize("options", [{"heartbeat_s": 0.0}, {"max_queued": 0}, {"max_backlog": 0}])
def test_the_options_of_a_publisher_are_positive(options: dict[str, float]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name}=0.*must be positive"):
        KVEventPublisher("r1", HOST, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"silence_s": 0.0}, {"resync_s": 0.0}, {"renew_s": 0.0}])
def test_the_options_of_a_subscriber_are_positive(options: dict[str, float]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name}=0.*must be positive"):
        Ingress(Known(), **options)


@pytest.mark.parametrize(("address", "host"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_only_an_ipv6_address_is_bracketed_in_an_endpoint(address: str, host: str) -> None:
    assert url_host(ip_address(address)) == host
