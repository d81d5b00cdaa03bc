"""Helpers for tests of the KV transport on real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import zmq

from deployments.observability.recorder import Recorder
from deployments.transport.kv_events.publisher import KVEventPublisher
from deployments.transport.kv_events.subscriber import KVEventSubscriber
from engine.observability.metrics import Metric
from tests.deployments.kv_listener import Known
from tests.engine.observability.clock import Clock
from tests.waiting import HANG_S, until

HOST = "127.0.0.1"


class Ingress:
    """A subscriber with its listener and metrics."""

    def __init__(self, known: Known, **options: Any) -> None:
        self.known, self.recorder = known, Recorder()
        self.subscriber = KVEventSubscriber(known, self.recorder, **({"silence_s": HANG_S} | options))
        self.set_endpoints, self.close = self.subscriber.set_endpoints, self.subscriber.close

    def join(self, *publishers: KVEventPublisher, names: Iterable[str] = ("r1",)) -> None:
        """Subscribe to these and wait for their snapshots."""
        endpoints = {name: publisher.endpoint for name, publisher in zip(names, publishers, strict=True)}
        self.set_endpoints(endpoints)
        for name in endpoints:
            self.known.wait_count("replaced", name)

    def pass_time_until_lost(self, clock: Clock, replica: str = "r1") -> None:
        """Move the clock until the events of a silent replica count as lost; messages may still be on the way."""

        def is_lost() -> bool:
            clock.now += 1.0
            return self.known.count("events_lost", replica) > 0

        until(is_lost, f"the events of {replica} are lost", pause_s=0.01)

    def metric(self, metric: Metric, *labels: str) -> float:
        return sum(
            sample.value for sample in self.recorder.snapshot() if sample.metric is metric and sample.labels == labels
        )

    def wait_for_blocks(self, replica: str, *hashes: int) -> None:
        self.known.wait(lambda: self.known.blocks[replica] == set(hashes), for_what=f"blocks {hashes}")


class Transport:
    """Makes publishers and ingresses, and closes them at the end of the test."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def publisher(self, replica: str = "r1", **options: float) -> KVEventPublisher:
        publisher = KVEventPublisher(replica, HOST, **options)  # type: ignore[arg-type]
        self._stack.callback(publisher.close)
        return publisher

    def ingress(self, known: Known | None = None, **options: Any) -> Ingress:
        """Return a new ingress; the options are those of KVEventSubscriber. Without ``silence_s`` none is noticed."""
        ingress = Ingress(known or Known(), **options)
        self._stack.callback(ingress.close)
        return ingress


@contextmanager
def fake_publisher(port: int = 0) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A bare socket in the role of a publisher."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.XPUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(1000 * HANG_S))
        socket.bind(f"tcp://{HOST}:{port or '*'}")
        yield socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


def reuse_port(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next publisher bind to a port that is already known."""

    def bind(context: zmq.Context[zmq.Socket[bytes]], host: str, max_queued: int) -> tuple[zmq.Socket[bytes], str]:
        socket = context.socket(zmq.XPUB)
        socket.bind(endpoint)
        return socket, endpoint

    monkeypatch.setattr("deployments.transport.kv_events.publisher.bind_publisher", bind)


class LossyPublisher(KVEventPublisher):
    """Drops the messages whose topic satisfies ``loses``."""

    loses: Callable[[bytes], bool] = staticmethod(lambda topic: False)

    def _send(self, topic: bytes, data: bytes | zmq.Frame) -> None:
        if not self.loses(topic):
            super()._send(topic, data)


class PausedListener(Known):
    """Blocks at its first batch until ``go_on`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused, self.go_on = threading.Event(), threading.Event()

    def stored(self, replica: str, hashes: Iterable[int]) -> None:
        self.is_paused.set()
        assert self.go_on.wait(HANG_S)
        super().stored(replica, hashes)
