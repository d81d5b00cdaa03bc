"""Peers that send malformed, oversized or endless messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import pytest
import zmq

from deployments.observability.ingress_metrics import KV_INDEX_DROPPED, KV_INDEX_GAPS
from deployments.transport.hashes import pack_hashes
from deployments.transport.kv_events import sockets as kv_sockets
from deployments.transport.kv_events.codec import MAX_MESSAGE_BYTES, encode
from deployments.transport.kv_events.messages import LoadMessage, Snapshot, events_message
from deployments.transport.kv_events.topics import Topics
from tests.deployments.kv_listener import Known, batch, load, removed, stored
from tests.deployments.transport.kv_events.transport import (
    Ingress,
    Transport,
    fake_publisher,
)
from tests.engine.observability.clock import Clock
from tests.waiting import HANG_S, until


def test_malformed_messages_are_counted_and_dropped(transport: Transport, caplog: pytest.LogCaptureFixture) -> None:
    topics, ingress = Topics("r1"), transport.ingress(silence_s=HANG_S, resync_s=HANG_S, renew_s=HANG_S)
    good = encode(events_message(batch(0, stored(1)), time.time()))
    bad: list[list[bytes]] = [
        [topics.events, b""],
        [topics.events, good[:-1]],
        [topics.events, good + b"\0"],
        [topics.events, encode(LoadMessage(0, -1, load()))],
        [topics.load, good],
        [topics.events],
        [topics.events, good, good],
        [topics.events + b"more", good],
        [topics.load, b"\x91" * 10_000],
        [topics.events, b"cos\nsystem\n(S'true'\ntR."],
    ]
    with fake_publisher() as (sender, endpoint):
        ingress.set_endpoints({"r1": endpoint})
        requested = [sender.recv()[1:] for _ in range(4)][-1]
        assert topics.is_snapshot(requested)
        for message in bad:
            sender.send_multipart(message)
        until(lambda: ingress.metric(KV_INDEX_DROPPED, "malformed") == len(bad), "all are dropped")
        sender.send_multipart([topics.load, bytes(MAX_MESSAGE_BYTES + 1)])
        until(lambda: ingress.metric(KV_INDEX_DROPPED, "oversized") == 1, "it is dropped")
        sender.send_multipart([topics.snapshot("0" * 16), encode(Snapshot(1, 0, pack_hashes([9])))])  # not requested
        assert not ingress.known.calls
        sender.send_multipart([requested, encode(Snapshot(1, -1, b""))])
        sender.send_multipart([topics.events, good])
        ingress.wait_for_blocks("r1", 1)
    logged = [record.getMessage() for record in caplog.records if "is dropped" in record.getMessage()]
    assert logged == ["a message of replica r1 is dropped: Input data was truncated"], "not once, for the first one"


def test_a_message_over_the_socket_limit_closes_the_connection(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_sockets, "MAX_SNAPSHOT_BYTES", 1000)
    topics, clock = Topics("r1"), Clock()
    ingress = transport.ingress(silence_s=0.2, renew_s=0.4, clock=clock)
    with fake_publisher() as (sender, endpoint):
        ingress.set_endpoints({"r1": endpoint})
        for _ in range(3):
            sender.recv()
        sender.send_multipart([topics.load, bytes(100_000)])
        while sender.recv() != b"\0" + topics.load:  # the subscriber disconnects ...
            pass
        ingress.pass_time_until_lost(clock)
        clock.now += 1.0
        while sender.recv() != b"\1" + topics.load:  # ... and reconnects
            pass
        until(lambda: _receives_reports(sender, topics, ingress), "a report arrives", pause_s=0.01)
    assert ingress.known.count("events_lost", "r1") == 1


def _receives_reports(sender: zmq.Socket[bytes], topics: Topics, ingress: Ingress) -> bool:
    sender.send_multipart([topics.load, encode(LoadMessage(0, -1, load()))])
    return ingress.known.count("report", "r1") > 0


def test_a_publisher_that_floods_does_not_starve_the_others(transport: Transport) -> None:
    topics, ingress, publisher = Topics("loud"), transport.ingress(silence_s=HANG_S), transport.publisher("r1")
    data = encode(events_message(batch(0, stored(1)), time.time()))
    is_done = threading.Event()

    def flood(sender: zmq.Socket[bytes]) -> None:
        while not is_done.is_set():
            for _ in range(100):
                sender.send_multipart([topics.events, data])

    with fake_publisher() as (sender, endpoint):
        ingress.set_endpoints({"loud": endpoint, "r1": publisher.endpoint})
        for _ in range(3):
            sender.recv()
        thread = threading.Thread(target=flood, args=(sender,))
        thread.start()
        try:
            for number in range(20):
                publisher.publish_events(batch(number, stored(number)))
            ingress.wait_for_blocks("r1", *range(20))
        finally:
            is_done.set()
            thread.join()


def test_a_flood_of_snapshot_requests_does_not_delay_events(transport: Transport) -> None:
    publisher, ingress = transport.publisher(), transport.ingress()
    publisher.publish_events(batch(0, stored(*range(1000))))
    ingress.join(publisher)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.SUB) as greedy:
        greedy.setsockopt(zmq.LINGER, 0)
        greedy.connect(publisher.endpoint)
        for number in range(5000):
            greedy.subscribe(Topics("r1").snapshot(f"{number:016x}"))
            greedy.subscribe(f"nonsense {number}".encode())
        for number in range(1, 51):
            publisher.publish_events(batch(number, removed(number)))
        ingress.wait_for_blocks("r1", 0, *range(51, 1000))
        assert ingress.metric(KV_INDEX_GAPS) == 0
        assert len(publisher._requested) <= 1024


class Failing(Known):
    """A listener that cannot remove blocks, nor lose events."""

    def removed(self, replica: str, hashes: Iterable[int]) -> None:
        super()._note("removed", replica)
        raise RuntimeError("no")

    def events_lost(self, replica: str) -> None:
        super().events_lost(replica)
        raise RuntimeError("no")


def test_a_failing_listener_gets_a_new_snapshot(transport: Transport, caplog: pytest.LogCaptureFixture) -> None:
    publisher, ingress = transport.publisher(), transport.ingress(Failing(), resync_s=0.05)
    publisher.publish_events(batch(0, stored(1, 2)))
    ingress.join(publisher)
    publisher.publish_events(batch(1, (*removed(1), *stored(3))))
    ingress.wait_for_blocks("r1", 2, 3)
    assert "could not be applied" in caplog.text


def test_a_failing_listener_gets_the_new_snapshot_only_after_a_while(transport: Transport) -> None:
    """Otherwise one that always fails would request snapshots in a loop."""
    publisher, ingress = (
        transport.publisher(heartbeat_s=0.01),
        transport.ingress(Failing(), resync_s=60.0, silence_s=60.0),
    )
    ingress.join(publisher)
    publisher.publish_load(load())
    publisher.publish_events(batch(0, (*stored(1, 2), *removed(1))))
    ingress.known.wait_count("removed", "r1")
    ingress.known.wait_count("report", "r1", ingress.known.count("report", "r1") + 3)
    assert ingress.known.count("replaced", "r1") == 1
    assert ingress.metric(KV_INDEX_GAPS) == 0


def test_a_listener_that_fails_at_a_loss_gets_what_comes_after_it(
    transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    topics, clock = Topics("r1"), Clock()
    ingress = transport.ingress(Failing(), silence_s=0.05, clock=clock)
    with fake_publisher() as (sender, endpoint):
        ingress.set_endpoints({"r1": endpoint})
        ingress.pass_time_until_lost(clock)
        until(lambda: _receives_reports(sender, topics, ingress), "a report arrives", pause_s=0.01)
    assert "the loss of replica r1 could not be reported" in caplog.text
