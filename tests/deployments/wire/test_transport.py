"""The KV transport on real sockets: publishers, subscribers, and those who only claim to be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import zmq

from deployments.observability.ingress_metrics import KV_INDEX_DROPPED, KV_INDEX_GAPS, KV_INDEX_LAG
from deployments.observability.recorder import Recorder
from deployments.wire import sockets as kv_sockets
from deployments.wire.messages import (
    MAX_MESSAGE_BYTES,
    Snapshot,
    Topics,
    encode,
    events_message,
    load_message,
    pack_hashes,
)
from deployments.wire.publisher import KVEventPublisher
from deployments.wire.subscriber import KVEventSubscriber
from engine.errors import ConfigError
from engine.observability.metrics import Metric
from tests.deployments.kv_listener import CLEARED, Known, batch, eventually, load, removed, stored

HOST = "127.0.0.1"


class Ingress:
    """A subscriber with what it tells."""

    def __init__(self, known: Known, **options: float) -> None:
        self.known, self.recorder = known, Recorder()
        self.subscriber = KVEventSubscriber(known, self.recorder, **options)
        self.set_endpoints, self.close = self.subscriber.set_endpoints, self.subscriber.close

    def join(self, *publishers: KVEventPublisher, names: Iterable[str] = ("r1",)) -> None:
        """Listen to these and wait for their snapshots."""
        endpoints = {name: one.endpoint for name, one in zip(names, publishers, strict=True)}
        self.set_endpoints(endpoints)
        for name in endpoints:
            self.known.wait_count("replaced", name)

    def metric(self, metric: Metric, *labels: str) -> float:
        return sum(one.value for one in self.recorder.snapshot() if one.metric is metric and one.labels == labels)

    def wait_for_blocks(self, replica: str, *hashes: int) -> None:
        self.known.wait(lambda: self.known.blocks[replica] == set(hashes), for_what=f"blocks {hashes}")


class Made:
    """Makes publishers and ingresses, and closes them in the end."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def publisher(self, replica: str = "r1", **options: float) -> KVEventPublisher:
        made = KVEventPublisher(replica, HOST, **options)  # type: ignore[arg-type]
        self._stack.callback(made.close)
        return made

    def ingress(self, known: Known | None = None, **options: float) -> Ingress:
        made = Ingress(known or Known(), **options)
        self._stack.callback(made.close)
        return made


@pytest.fixture
def make() -> Iterator[Made]:
    before = set(threading.enumerate())
    with ExitStack() as stack:
        yield Made(stack)
    eventually(lambda: set(threading.enumerate()) <= before)


@contextmanager
def impostor(port: int = 0) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A socket that says what it likes."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.XPUB) as made:
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVTIMEO, 10_000)
        made.bind(f"tcp://{HOST}:{port or '*'}")
        yield made, made.getsockopt_string(zmq.LAST_ENDPOINT)


def on_port_of(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next publisher take over a port."""

    def bind(context: zmq.Context[zmq.Socket[bytes]], host: str, max_queued: int) -> tuple[zmq.Socket[bytes], str]:
        made = context.socket(zmq.XPUB)
        made.bind(endpoint)
        return made, endpoint

    monkeypatch.setattr("deployments.wire.publisher.bind_publisher", bind)


# ---- what is told is known -------------------------------------------------------------------------------------------


def test_who_joins_gets_a_snapshot_and_then_every_change(make: Made) -> None:
    publisher, ingress = make.publisher(), make.ingress()
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


def test_many_steps_come_in_order_and_without_a_gap(make: Made) -> None:
    publisher, ingress = make.publisher(), make.ingress()
    ingress.join(publisher)
    for number in range(500):
        publisher.publish_events(batch(number, (*stored(number + 3, 1000), *removed(number, 1000))))
    ingress.wait_for_blocks("r1", 500, 501, 502)
    assert ingress.metric(KV_INDEX_GAPS) == 0


def test_what_joins_the_queue_is_announced_to_every_ingress(make: Made) -> None:
    publisher, ingresses = make.publisher(), [make.ingress(), make.ingress()]
    for ingress in ingresses:
        ingress.join(publisher)
    publisher.publish_awaited([1, 2, 2**64 - 1])
    for ingress in ingresses:
        ingress.known.wait_count("awaited", "r1")
        assert ingress.known.awaiting["r1"] == [[1, 2, 2**64 - 1]]
        assert ingress.known.blocks["r1"] == set()  # they are not there yet
    with pytest.raises(OverflowError):
        publisher.publish_awaited([2**64])


def test_many_ingresses_that_join_at_once_agree(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = make.publisher()
    publisher.publish_events(batch(0, stored(*range(20_000))))
    ingresses = [make.ingress() for _ in range(16)]
    for ingress in ingresses:
        ingress.set_endpoints({"r1": publisher.endpoint})
    for number in range(1, 51):
        publisher.publish_events(batch(number, (*removed(number), *stored(10**6 + number))))
    for ingress in ingresses:
        ingress.wait_for_blocks("r1", 0, *range(51, 20_000), *range(10**6 + 1, 10**6 + 51))


def test_names_that_begin_alike_are_kept_apart(make: Made) -> None:
    names = ["r1", "r10", "r1/", "r"]
    publishers = [make.publisher(name) for name in names]
    ingress = make.ingress()
    ingress.join(*publishers, names=names)
    for place, publisher in enumerate(publishers):
        publisher.publish_events(batch(0, stored(place)))
    for place, name in enumerate(names):
        ingress.wait_for_blocks(name, place)


def test_the_load_comes_at_once_and_again_and_again(make: Made) -> None:
    publisher, ingress = make.publisher(heartbeat_s=0.02), make.ingress()
    ingress.join(publisher)
    assert not ingress.known.reports["r1"]
    publisher.publish_load(load(7))
    ingress.known.wait_count("report", "r1", 10)
    assert {one for one, _ in ingress.known.reports["r1"]} == {load(7)}
    times = [when for _, when in ingress.known.reports["r1"]]
    assert times == sorted(times)
    assert times[-1] <= time.monotonic()
    publisher.publish_load(load(8))
    ingress.known.wait(lambda: ingress.known.reports["r1"][-1][0] == load(8))


def test_a_new_load_does_not_wait_for_the_heartbeat(make: Made) -> None:
    publisher, ingress = make.publisher(heartbeat_s=3600), make.ingress(silence_s=3600)
    ingress.join(publisher)
    for number in range(5):
        publisher.publish_load(load(number))
        ingress.known.wait(lambda n=number: [one for one, _ in ingress.known.reports["r1"]][-1:] == [load(n)])  # type: ignore[misc]


# ---- what is lost is noticed -----------------------------------------------------------------------------------------


class Lossy(KVEventPublisher):
    """Loses what it is told to lose."""

    loses: Callable[[bytes], bool] = staticmethod(lambda topic: False)

    def _send(self, topic: bytes, data: bytes | zmq.Frame) -> None:
        if not self.loses(topic):
            super()._send(topic, data)


@pytest.fixture
def lossy() -> Iterator[Lossy]:
    made = Lossy("r1", HOST, heartbeat_s=0.05)
    yield made
    made.close()


def test_a_lost_batch_is_a_gap_and_a_snapshot_mends_it(make: Made, lossy: Lossy) -> None:
    ingress = make.ingress()
    ingress.join(lossy)
    lossy.publish_events(batch(0, stored(1, 2)))
    ingress.wait_for_blocks("r1", 1, 2)
    lossy.loses = lambda topic: topic.startswith(b"e/")
    lossy.publish_events(batch(1, (*removed(1), *stored(3))))
    ingress.wait_for_blocks("r1", 2, 3)  # though no batch follows: the load says that there was one
    assert ingress.metric(KV_INDEX_GAPS) >= 1
    lossy.loses = lambda topic: False
    lossy.publish_events(batch(2, stored(4)))
    ingress.wait_for_blocks("r1", 2, 3, 4)


def test_a_lost_snapshot_is_asked_for_again(make: Made, lossy: Lossy) -> None:
    lossy.publish_events(batch(0, stored(1, 2)))
    lost: list[bytes] = []

    def lose(topic: bytes) -> bool:
        is_lost = topic.startswith(b"s/") and len(lost) < 2
        if is_lost:
            lost.append(topic)
        return is_lost

    lossy.loses = lose
    ingress = make.ingress(resync_s=0.05)
    ingress.join(lossy)
    ingress.wait_for_blocks("r1", 1, 2)
    assert len(set(lost)) == 2


def test_a_backlog_that_is_too_long_forgets_but_never_lies(make: Made) -> None:
    publisher, ingress = make.publisher(max_backlog=1), make.ingress()
    ingress.join(publisher)
    for number in range(3000):
        publisher.publish_events(batch(number, (*stored(number + 2), *removed(number))))
    publisher.publish_events(batch(3000, stored(5000)))
    ingress.known.wait(lambda: 5000 in ingress.known.blocks["r1"])
    assert ingress.known.blocks["r1"] <= {3000, 3001, 5000}


def test_a_batch_that_cannot_be_sent_is_lost_and_nothing_else(make: Made, caplog: pytest.LogCaptureFixture) -> None:
    publisher, ingress = make.publisher(), make.ingress()
    ingress.join(publisher)
    publisher.publish_events(batch(0, stored(1)))
    publisher.publish_events(batch(1, stored(2**64)))
    publisher.publish_events(batch(2, stored(2)))
    publisher.publish_events(batch(3, stored(3)))
    ingress.wait_for_blocks("r1", 2, 3)
    assert "cannot be sent" in caplog.text


class Paused(Known):
    """Hears nothing more from its first batch on until it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused, self.go_on = threading.Event(), threading.Event()

    def stored(self, replica: str, hashes: Iterable[int]) -> None:
        self.is_paused.set()
        assert self.go_on.wait(60)
        super().stored(replica, hashes)


def test_a_slow_ingress_loses_messages_and_delays_nobody(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sockets, "MAX_RECEIVED", 4)
    publisher = make.publisher(max_queued=4)
    slow, fast = make.ingress(paused := Paused()), make.ingress()
    slow.join(publisher)
    fast.join(publisher)
    many = stored(*range(10_000))
    took = []
    for number in range(300):  # 24 MB, far more than the network's buffers hold
        began = time.perf_counter()
        publisher.publish_events(batch(number, (*many, *stored(10_000 + number), *removed(number))))
        took.append(time.perf_counter() - began)
    assert paused.is_paused.wait(20)
    assert sorted(took)[len(took) // 2] < 0.005
    eventually(lambda: not publisher._batches)
    fast.wait_for_blocks("r1", *(set(range(10_300)) - {299}))
    paused.go_on.set()
    slow.wait_for_blocks("r1", *(set(range(10_300)) - {299}))
    assert slow.metric(KV_INDEX_GAPS) >= 1


def test_silence_is_a_loss_until_it_ends(make: Made, lossy: Lossy) -> None:
    ingress = make.ingress(silence_s=0.5)
    lossy.publish_events(batch(0, stored(1)))
    ingress.join(lossy)
    lossy.loses = lambda topic: True
    ingress.known.wait_count("lost", "r1")
    lossy.publish_events(batch(1, stored(2)))
    lossy.loses = lambda topic: False
    ingress.known.wait_count("replaced", "r1", 2)
    ingress.wait_for_blocks("r1", 1, 2)


# ---- replicas come and go --------------------------------------------------------------------------------------------


def test_a_restart_behind_the_same_endpoint_is_another_generation(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    first, ingress = make.publisher(), make.ingress()
    first.publish_events(batch(0, stored(1, 2)))
    ingress.join(first)
    first.close()
    on_port_of(first.endpoint, monkeypatch)
    second = make.publisher()
    second.publish_events(batch(0, stored(7), generation=2))
    ingress.wait_for_blocks("r1", 7)
    assert ingress.known.count("cleared", "r1") == 1
    second.publish_events(batch(1, stored(8), generation=2))
    ingress.wait_for_blocks("r1", 7, 8)


def test_an_engine_that_begins_anew_clears_at_once(make: Made) -> None:
    publisher, ingress = make.publisher(), make.ingress()
    publisher.publish_events(batch(0, stored(1, 2)))
    ingress.join(publisher)
    publisher.publish_events(batch(0, stored(5), generation=2))
    publisher.publish_events(batch(1, stored(6), generation=2))
    ingress.wait_for_blocks("r1", 5, 6)
    assert ingress.known.count("cleared", "r1") == 1


def test_whoever_takes_over_a_port_is_not_taken_for_its_owner(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    first, ingress = make.publisher("r1"), make.ingress(silence_s=0.5)
    first.publish_events(batch(0, stored(1)))
    ingress.join(first)
    first.close()
    on_port_of(first.endpoint, monkeypatch)
    second = make.publisher("r2")
    second.publish_events(batch(0, stored(66)))
    second.publish_load(load(66))
    other = make.ingress()
    other.join(second, names=["r2"])
    ingress.known.wait_count("lost", "r1")
    assert ingress.known.blocks["r1"] == {1}
    assert not ingress.known.reports["r1"]
    ingress.set_endpoints({"r2": second.endpoint})
    ingress.wait_for_blocks("r2", 66)


def test_of_a_removed_replica_nothing_more_is_told(make: Made) -> None:
    publisher, ingress = make.publisher(), make.ingress(paused := Paused())
    ingress.join(publisher)
    for number in range(100):
        publisher.publish_events(batch(number, stored(number)))
    assert paused.is_paused.wait(20)
    eventually(lambda: not publisher._batches)
    ingress.set_endpoints({})
    paused.go_on.set()
    eventually(lambda: not ingress.subscriber._links)
    assert paused.blocks["r1"] == {0}, "more than what was being told is applied"


def test_a_replica_that_comes_again_joins_anew(make: Made) -> None:
    publisher, ingress = make.publisher(), make.ingress()
    publisher.publish_events(batch(0, stored(1)))
    ingress.join(publisher)
    ingress.set_endpoints({})
    ingress.set_endpoints({"r1": publisher.endpoint})
    ingress.known.wait_count("replaced", "r1", 2)
    ingress.set_endpoints({"r1": publisher.endpoint})  # the same list: nothing happens
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
def test_an_endpoint_that_is_none_is_left_out(make: Made, endpoint: str) -> None:
    publisher, ingress = make.publisher(), make.ingress()
    for _ in range(2):
        ingress.set_endpoints({"bad": endpoint, "r1": publisher.endpoint})
    ingress.known.wait_count("replaced", "r1")
    assert ingress.metric(KV_INDEX_DROPPED, "malformed") == 1
    assert not ingress.known.count("lost", "bad")


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "::", "", "[::]", "0", "::ffff:0.0.0.0", "eth0", "192.0.2.1", "224.0.0.1"]
)
def test_a_publisher_binds_to_one_address_of_its_own(make: Made, host: str) -> None:
    with pytest.raises(ConfigError, match="host="):
        KVEventPublisher("r1", host)


# ---- who means harm --------------------------------------------------------------------------------------------------


def test_what_cannot_be_a_message_is_counted_and_dropped(make: Made) -> None:
    topics, ingress = Topics("r1"), make.ingress(silence_s=60)
    good = encode(events_message(batch(0, stored(1)), time.time()))
    bad: list[list[bytes]] = [
        [topics.events, b""],
        [topics.events, good[:-1]],
        [topics.events, good + b"\0"],
        [topics.events, encode(load_message(0, -1, load()))],
        [topics.load, good],
        [topics.events],
        [topics.events, good, good],
        [topics.events + b"more", good],
        [topics.load, b"\x91" * 10_000],
        [topics.events, b"cos\nsystem\n(S'true'\ntR."],
    ]
    with impostor() as (sender, endpoint):
        ingress.set_endpoints({"r1": endpoint})
        asked = [sender.recv()[1:] for _ in range(4)][-1]
        assert topics.is_snapshot(asked)
        for message in bad:
            sender.send_multipart(message)
        eventually(lambda: ingress.metric(KV_INDEX_DROPPED, "malformed") == len(bad))
        sender.send_multipart([topics.load, bytes(MAX_MESSAGE_BYTES + 1)])
        eventually(lambda: ingress.metric(KV_INDEX_DROPPED, "oversized") == 1)
        sender.send_multipart([topics.snapshot("0" * 16), encode(Snapshot(1, 0, pack_hashes([9])))])  # nobody asked
        assert not ingress.known.calls
        sender.send_multipart([asked, encode(Snapshot(1, -1, b""))])
        sender.send_multipart([topics.events, good])
        ingress.wait_for_blocks("r1", 1)


def test_what_exceeds_the_second_wall_costs_the_connection(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sockets, "MAX_SNAPSHOT_BYTES", 1000)
    topics, ingress = Topics("r1"), make.ingress(silence_s=0.2, renew_s=0.4)
    with impostor() as (sender, endpoint):
        ingress.set_endpoints({"r1": endpoint})
        for _ in range(3):
            sender.recv()
        sender.send_multipart([topics.load, bytes(100_000)])
        for sign in (b"\0", b"\1"):  # it goes, and comes again
            while sender.recv() != sign + topics.load:
                pass
        eventually(lambda: _heard_after(sender, topics, ingress))
    assert ingress.known.count("lost", "r1") == 1


def _heard_after(sender: zmq.Socket[bytes], topics: Topics, ingress: Ingress) -> bool:
    sender.send_multipart([topics.load, encode(load_message(0, -1, load()))])
    return ingress.known.count("report", "r1") > 0


def test_one_who_talks_without_end_does_not_silence_the_others(make: Made) -> None:
    topics, ingress, publisher = Topics("loud"), make.ingress(silence_s=60), make.publisher("r1")
    data = encode(events_message(batch(0, stored(1)), time.time()))
    is_done = threading.Event()

    def talk(sender: zmq.Socket[bytes]) -> None:
        while not is_done.is_set():
            for _ in range(100):
                sender.send_multipart([topics.events, data])

    with impostor() as (sender, endpoint):
        ingress.set_endpoints({"loud": endpoint, "r1": publisher.endpoint})
        for _ in range(3):
            sender.recv()
        thread = threading.Thread(target=talk, args=(sender,))
        thread.start()
        try:
            for number in range(20):
                publisher.publish_events(batch(number, stored(number)))
            ingress.wait_for_blocks("r1", *range(20))
        finally:
            is_done.set()
            thread.join()


def test_who_asks_without_end_does_not_keep_events_from_others(make: Made) -> None:
    publisher, ingress = make.publisher(), make.ingress()
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
        assert len(publisher._asked) <= 1024


def test_a_listener_that_fails_is_told_anew(make: Made, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Known):
        def removed(self, replica: str, hashes: Iterable[int]) -> None:
            raise RuntimeError("no")

    publisher, ingress = make.publisher(), make.ingress(Failing(), resync_s=0.05)
    publisher.publish_events(batch(0, stored(1, 2)))
    ingress.join(publisher)
    publisher.publish_events(batch(1, (*removed(1), *stored(3))))
    ingress.wait_for_blocks("r1", 2, 3)
    assert "could not be applied" in caplog.text


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_close_ends_everything_at_once_and_twice(make: Made) -> None:
    publisher, ingress, idle = make.publisher(), make.ingress(), make.ingress()
    ingress.set_endpoints({"r1": publisher.endpoint, "nobody": "tcp://127.0.0.1:1"})
    ingress.known.wait_count("replaced", "r1")
    began = time.monotonic()
    for one in (idle, ingress, publisher, publisher, ingress):
        one.close()
    assert time.monotonic() - began < 5
    assert not [one for one in threading.enumerate() if one.name.startswith("kv-")]
    publisher.publish_events(batch(0, stored(1)))
    publisher.publish_load(load())
    ingress.set_endpoints({})
