"""Lost messages, slow subscribers and silence: the subscriber notices and resyncs."""

from __future__ import annotations

import pytest

from deployments.observability.ingress_metrics import KV_INDEX_GAPS
from deployments.transport.kv_events import sockets as kv_sockets
from tests.deployments.kv_listener import batch, load, removed, stored
from tests.deployments.transport.kv_events.transport import (
    LossyPublisher,
    PausedListener,
    Transport,
)
from tests.engine.observability.clock import Clock
from tests.waiting import HANG_S, until


def test_a_lost_batch_is_a_gap_that_a_snapshot_repairs(transport: Transport, lossy: LossyPublisher) -> None:
    ingress = transport.ingress()
    ingress.join(lossy)
    lossy.publish_events(batch(0, stored(1, 2)))
    ingress.wait_for_blocks("r1", 1, 2)
    lossy.loses = lambda topic: topic.startswith(b"e/")
    lossy.publish_events(batch(1, (*removed(1), *stored(3))))
    ingress.wait_for_blocks("r1", 2, 3)  # without a further batch: the load report reveals the gap
    assert ingress.metric(KV_INDEX_GAPS) >= 1
    lossy.loses = lambda topic: False
    lossy.publish_events(batch(2, stored(4)))
    ingress.wait_for_blocks("r1", 2, 3, 4)


def test_a_lost_snapshot_is_requested_again(transport: Transport, lossy: LossyPublisher) -> None:
    lossy.publish_events(batch(0, stored(1, 2)))
    lost: list[bytes] = []

    def lose(topic: bytes) -> bool:
        is_lost = topic.startswith(b"s/") and len(lost) < 2
        if is_lost:
            lost.append(topic)
        return is_lost

    lossy.loses = lose
    ingress = transport.ingress(resync_s=0.05)
    ingress.join(lossy)
    ingress.wait_for_blocks("r1", 1, 2)
    assert len(set(lost)) == 2


def test_a_full_backlog_drops_blocks_but_lists_no_evicted_ones(transport: Transport) -> None:
    publisher, ingress = transport.publisher(max_backlog=1), transport.ingress()
    ingress.join(publisher)
    for number in range(3000):
        publisher.publish_events(batch(number, (*stored(number + 2), *removed(number))))
    publisher.publish_events(batch(3000, stored(5000)))
    ingress.known.wait(lambda: 5000 in ingress.known.blocks["r1"])
    assert ingress.known.blocks["r1"] <= {3000, 3001, 5000}


def test_the_backlog_is_bounded(transport: Transport) -> None:
    publisher = transport.publisher(max_backlog=3)
    publisher.close()  # its thread takes nothing any more
    for number in range(10):
        publisher.publish_events(batch(number, stored(number)))
    assert [batch.number for batch, _ in publisher._batches] == [7, 8, 9]


def test_a_batch_that_cannot_be_encoded_is_the_only_one_lost(
    transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, ingress = transport.publisher(), transport.ingress()
    ingress.join(publisher)
    publisher.publish_events(batch(0, stored(1)))
    publisher.publish_events(batch(1, stored(2**64)))
    publisher.publish_events(batch(2, stored(2)))
    publisher.publish_events(batch(3, stored(3)))
    ingress.wait_for_blocks("r1", 2, 3)
    assert "cannot be sent" in caplog.text


@pytest.mark.parametrize(("limit", "value"), [("MAX_MESSAGE_BYTES", 300), ("MAX_EVENT_GROUPS", 4)])
def test_the_blocks_of_a_batch_that_is_too_large_come_with_the_next_snapshot(
    transport: Transport, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(f"deployments.transport.kv_events.publisher.{limit}", value)
    publisher, ingress = transport.publisher(), transport.ingress()
    ingress.join(publisher)
    publisher.publish_events(batch(0, stored(1)))
    ingress.wait_for_blocks("r1", 1)
    large = [event for number in range(100, 200) for event in (*stored(number), *removed(number - 50))]
    publisher.publish_events(batch(1, tuple(large)))
    publisher.publish_events(batch(2, stored(2)))
    ingress.wait_for_blocks("r1", 1, 2, *range(150, 200))
    assert ingress.metric(KV_INDEX_GAPS) == 1


def test_a_slow_ingress_does_not_delay_the_others(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sockets, "MAX_RECEIVED", 4)
    # The reader is not to lose its connection because it reads no heartbeats of the publisher while it is held up.
    monkeypatch.setattr(kv_sockets, "ALIVE_TIMEOUT_MS", int(1000 * HANG_S))
    publisher = transport.publisher(max_queued=4)
    slow, fast = transport.ingress(paused := PausedListener()), transport.ingress()
    slow.join(publisher)
    fast.join(publisher)
    many = stored(*range(10_000))
    for number in range(300):  # 24 MB, far more than the network's buffers hold
        publisher.publish_events(batch(number, (*many, *stored(10_000 + number), *removed(number))))
    assert paused.is_paused.wait(HANG_S)
    until(lambda: not publisher._batches, "all batches were sent")
    fast.wait_for_blocks("r1", *(set(range(10_300)) - {299}))
    paused.go_on.set()
    slow.wait_for_blocks("r1", *(set(range(10_300)) - {299}))
    assert slow.metric(KV_INDEX_GAPS) >= 1


def test_a_silent_replica_is_lost_until_it_sends_again(transport: Transport, lossy: LossyPublisher) -> None:
    clock = Clock()
    ingress = transport.ingress(silence_s=0.5, clock=clock)
    lossy.publish_events(batch(0, stored(1)))
    ingress.join(lossy)
    lossy.loses = lambda topic: True
    ingress.pass_time_until_lost(clock)
    lossy.publish_events(batch(1, stored(2)))
    lossy.loses = lambda topic: False
    ingress.known.wait_count("replaced", "r1", 2)
    ingress.wait_for_blocks("r1", 1, 2)


def test_only_the_socket_of_a_replica_that_stays_silent_is_replaced(
    transport: Transport, lossy: LossyPublisher
) -> None:
    """A new socket costs a gap."""
    clock = Clock()
    ingress = transport.ingress(silence_s=0.4, renew_s=0.05, clock=clock)
    ingress.join(lossy)
    before = list(ingress.subscriber._subscriptions)
    lossy.publish_load(load())
    for _ in range(4):  # the time is over, but it sends: reports that had been waiting are from before
        ingress.known.wait_count("report", "r1", ingress.known.count("report", "r1") + 1)
        clock.now += 0.2
    assert list(ingress.subscriber._subscriptions) == before
    lossy.loses = lambda topic: True
    ingress.pass_time_until_lost(clock)
    until(
        lambda: ingress.subscriber._subscriptions and list(ingress.subscriber._subscriptions) != before,
        "the socket is replaced",
    )


def test_the_socket_of_a_silent_replica_is_kept_for_a_while(transport: Transport, lossy: LossyPublisher) -> None:
    clock = Clock()
    ingress = transport.ingress(silence_s=0.4, renew_s=1e9, clock=clock)
    ingress.join(lossy)
    before = list(ingress.subscriber._subscriptions)
    lossy.loses = lambda topic: True
    ingress.pass_time_until_lost(clock)
    for _ in range(3):
        clock.now += 1.0
        until(lambda: ingress.subscriber._next_tick > clock.now, "a tick", pause_s=0.002)
    assert list(ingress.subscriber._subscriptions) == before
