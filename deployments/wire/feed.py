"""ReplicaFeed: what one ingress makes of one replica's messages, so that what it knows of its cache is true.

                      snapshot                        a number is missing, silence, another generation
    awaiting a snapshot -----> in sync, batches are applied -----> awaiting a snapshot, under a fresh nonce

While a snapshot is awaited batches are ignored, and what was known before stays known, unless the engine began anew:
then its cache began empty, and is cleared at once. The feed knows neither sockets nor bytes nor clocks: it is given
messages and the time, says under which ``nonce`` it wants a snapshot, and tells a listener.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Protocol

from deployments.observability.ingress_metrics import KV_INDEX_GAPS
from deployments.wire.messages import (
    NONCE_LENGTH,
    REMOVED,
    STORED,
    AwaitedMessage,
    EventsMessage,
    LoadMessage,
    Snapshot,
)
from engine.observability.load import EngineLoad
from engine.observability.metrics import MetricSink

__all__ = ["Listener", "ReplicaFeed"]

MAX_FAILURES = 3  # snapshots that did not come, one after the other, before the replica counts as lost
MAX_WAIT_FACTOR = 8.0  # how much longer than at first a snapshot is waited for in the end


class Listener(Protocol):
    """Who wants to know; called from the subscriber's thread."""

    def stored(self, replica: str, hashes: Iterable[int]) -> None:
        """These blocks can be hit."""

    def removed(self, replica: str, hashes: Iterable[int]) -> None:
        """These blocks are gone."""

    def cleared(self, replica: str) -> None:
        """All blocks are gone."""

    def replaced(self, replica: str, hashes: Iterable[int]) -> None:
        """These blocks can be hit, and no others; ends what ``lost`` began."""

    def awaited(self, replica: str, hashes: Sequence[int], *, now: float) -> None:
        """A prompt of these blocks has joined the queue: those that are not cached will be."""

    def report(self, replica: str, load: EngineLoad, *, now: float) -> None:
        """The replica's load, at the monotonic time ``now``."""

    def lost(self, replica: str) -> None:
        """What is known of its blocks will not be true for long: its events have ceased, or make no sense."""


class ReplicaFeed:
    """The messages of one replica, from when it was first listed.

    Args:
        silence_s: without any message for so long the replica is lost.
        resync_s: how long the first snapshot is waited for; each further one twice as long as the one before.
    """

    def __init__(
        self, replica: str, listener: Listener, sink: MetricSink, *, now: float, silence_s: float, resync_s: float
    ) -> None:
        self._replica = replica
        self._listener = listener
        self._sink = sink
        self._silence_s = silence_s
        self._resync_s = resync_s
        self._generation: int | None = None  # None: nothing is known yet
        self._next = 0  # the number that the next batch must have
        self._is_synced = False
        self.is_silent = False  # nothing was heard for ``silence_s``
        self._is_lost = False
        self._heard_at = now
        self._num_failures = 0
        self.nonce: str | None = None  # under which a snapshot is awaited
        self._ask(now)

    def events(self, message: EventsMessage, now: float) -> None:
        """Apply what a step changed, if it is the next step."""
        self._heard(now)
        if self._is_synced and self._is_first(message):
            self._generation = message.generation
        self._follow_generation(message.generation, now)
        if not self._is_synced or message.number < self._next:
            return
        if message.number > self._next:
            self._gap(now)
            return
        self._apply(message)
        self._next += 1

    def awaited(self, message: AwaitedMessage, now: float) -> None:
        """Pass on what a request that has joined the queue will need."""
        self._heard(now)
        self._listener.awaited(self._replica, message.hashes, now=now)

    def load(self, message: LoadMessage, now: float) -> None:
        """Pass a load report on, and see whether batches were sent that have not come."""
        self._heard(now)
        if message.load is not None:
            self._listener.report(self._replica, message.load, now=now)
        self._follow_generation(message.generation, now)
        if self._is_synced and message.number >= self._next:
            self._gap(now)

    def snapshot(self, nonce: str, message: Snapshot, now: float) -> None:
        """Take a snapshot, if it is the one that is awaited."""
        self._heard(now)
        if nonce != self.nonce:
            return
        self._listener.replaced(self._replica, message.hashes)
        self._generation, self._next = message.generation, message.number + 1
        self._is_synced, self._is_lost, self._num_failures, self.nonce = True, False, 0, None

    def tick(self, now: float) -> None:
        """Notice what has not come."""
        if not self.is_silent and now - self._heard_at > self._silence_s:
            self.is_silent, self._is_synced, self.nonce = True, False, None
            self._lose()
        elif not self.is_silent and not self._is_synced and now >= self._ask_at:
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                self._lose()
            self._ask(now)

    def distrust(self, now: float) -> None:
        """What is known may be wrong, for a reason that lies here: begin anew, but not at once and for ever."""
        self._is_synced, self.nonce = False, None
        self._ask_at = now + self._wait_s

    def _apply(self, message: EventsMessage) -> None:
        for kind, hashes in message.changes():
            if kind == STORED:
                self._listener.stored(self._replica, hashes)
            elif kind == REMOVED:
                self._listener.removed(self._replica, hashes)
            else:
                self._listener.cleared(self._replica)

    def _is_first(self, message: EventsMessage) -> bool:
        """Whether an engine that had published nothing has begun to."""
        return self._generation == 0 and self._next == message.number == 0

    def _follow_generation(self, generation: int, now: float) -> None:
        if self._generation is None or generation == self._generation:
            return
        self._generation, self._is_synced = generation, False
        self._listener.cleared(self._replica)
        if self.nonce is None:  # else the engine of today gets to answer it
            self._ask(now)

    def _gap(self, now: float) -> None:
        self._sink.increment(KV_INDEX_GAPS)
        self._is_synced = False
        self._ask(now)

    @property
    def _wait_s(self) -> float:
        return self._resync_s * min(2.0**self._num_failures, MAX_WAIT_FACTOR)

    def _ask(self, now: float) -> None:
        self.nonce = secrets.token_hex(NONCE_LENGTH // 2)
        self._ask_at = now + self._wait_s

    def _heard(self, now: float) -> None:
        self._heard_at = now
        if self.is_silent:
            self.is_silent = False
            self._ask(now)

    def _lose(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._listener.lost(self._replica)
