"""ReplicaFeed: applies one replica's messages in order, and resyncs with a snapshot after a gap.

    waiting for a snapshot --- snapshot ---> in sync: batches are applied
    in sync --- a number is missing, silence, another run of the engine ---> waiting for a snapshot, under a new nonce

While it waits, batches are ignored and the listener keeps its old state. After a restart of the engine (another
``run_id``) the cache is empty, so the listener clears it at once. If several snapshots fail to arrive, or no message
at all, the feed reports that the replica's events are lost.

The feed knows neither sockets nor bytes nor clocks: the caller passes messages and times, and requests a snapshot
under ``nonce``.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Protocol

from deployments.observability.ingress_metrics import KV_INDEX_GAPS
from deployments.transport.kv_events.messages import (
    CLEARED,
    REMOVED,
    SAVED,
    SHARED,
    STATE_REMOVED,
    STATE_STORED,
    STORED,
    UNSAVED,
    UNSHARED,
    AwaitedMessage,
    EventsMessage,
    LoadMessage,
    Snapshot,
)
from deployments.transport.kv_events.topics import NONCE_LENGTH
from engine.kv.events import StorageName
from engine.observability.load import EngineLoad
from engine.observability.metrics import MetricSink

__all__ = ["Listener", "ReplicaFeed"]

MAX_FAILURES = 3  # consecutive snapshots that did not arrive, before the events count as lost
MAX_WAIT_FACTOR = 8.0  # bound of the exponential back-off between snapshot requests


class Listener(Protocol):
    """Receives the changes; called from the subscriber's thread."""

    def stored(self, replica: str, hashes: Iterable[int]) -> None:
        """The replica holds these blocks."""

    def removed(self, replica: str, hashes: Iterable[int]) -> None:
        """The replica has evicted these blocks."""

    def cleared(self, replica: str) -> None:
        """The replica holds no blocks, on storage neither."""

    def states_stored(self, replica: str, hashes: Iterable[int]) -> None:
        """A hit on the replica, whose model has states, may resume after these blocks."""

    def states_removed(self, replica: str, hashes: Iterable[int]) -> None:
        """A hit on the replica, whose model has states, may no longer resume after these blocks."""

    def saved(self, replica: str, hashes: Iterable[int], storage: StorageName = "disk") -> None:
        """The replica can read these blocks from storage."""

    def unsaved(self, replica: str, hashes: Iterable[int], storage: StorageName = "disk") -> None:
        """The replica can no longer read these blocks from storage."""

    def replaced(
        self,
        replica: str,
        hashes: Iterable[int],
        states: Iterable[int] | None = None,
        saved: Iterable[int] = (),
        shared: Iterable[int] = (),
    ) -> None:
        """The replica holds exactly these blocks (a snapshot); events continue from here.

        A hit may resume after ``states`` only; None: its model has no states. Its disk holds exactly ``saved``,
        and of the shared cache it knows exactly ``shared``.
        """

    def awaited(self, replica: str, hashes: Sequence[int], *, now: float) -> None:
        """A prompt of these blocks has joined the replica's queue; the missing ones will be computed."""

    def report(self, replica: str, load: EngineLoad, *, now: float) -> None:
        """The replica has reported its load, which arrives at the monotonic time ``now``."""

    def events_lost(self, replica: str) -> None:
        """The replica's events are missing, so what is known of its blocks gets out of date."""


class ReplicaFeed:
    """The messages of one replica, from when it was listed.

    Args:
        replica: its name, for the listener.
        listener: receives the changes.
        sink: where gaps are counted.
        now: monotonic seconds.
        silence_s: the replica's events count as lost after this many seconds without a message.
        resync_s: seconds to wait for the first snapshot; the wait doubles with each further one, up to 8 times.
    """

    def __init__(
        self, replica: str, listener: Listener, sink: MetricSink, *, now: float, silence_s: float, resync_s: float
    ) -> None:
        self._replica = replica
        self._listener = listener
        self._sink = sink
        self._silence_s = silence_s
        self._resync_s = resync_s
        self._run_id: int | None = None  # of the engine; None: unknown
        self._next_number = 0  # of the next batch
        self._is_synced = False
        self.is_silent = False  # no message for ``silence_s``
        self._reported_lost = False
        self._last_message_at = now
        self._num_failures = 0
        self.nonce: str | None = None  # of the requested snapshot; None: none is requested
        self._request_snapshot(now)

    def events(self, message: EventsMessage, now: float) -> None:
        """Apply the changes of a step if it is the next one; a later one is a gap, an earlier one a duplicate."""
        self._message_arrived(now)
        if self._is_synced and self._is_first_batch(message):
            self._run_id = message.run_id
        self._check_run_id(message.run_id, now)
        if not self._is_synced or message.number < self._next_number:
            return
        if message.number > self._next_number:
            self._on_gap(now)
            return
        self._apply(message)
        self._next_number += 1

    def awaited(self, message: AwaitedMessage, now: float) -> None:
        """Pass on the blocks of a request that has joined the queue."""
        self._message_arrived(now)
        self._listener.awaited(self._replica, message.hashes, now=now)

    def load(self, message: LoadMessage, now: float) -> None:
        """Pass on a load report; its number reveals batches that were sent but not received."""
        self._message_arrived(now)
        if message.load is not None:
            self._listener.report(self._replica, message.load, now=now)
        self._check_run_id(message.run_id, now)
        if self._is_synced and message.number >= self._next_number:
            self._on_gap(now)

    def snapshot(self, nonce: str, message: Snapshot, now: float) -> None:
        """Apply a snapshot if ``nonce`` is that of the last request."""
        self._message_arrived(now)
        if nonce != self.nonce:
            return
        self._listener.replaced(self._replica, message.hashes, message.states, message.saved, message.shared)
        self._run_id, self._next_number = message.run_id, message.number + 1
        self._is_synced, self._reported_lost, self._num_failures, self.nonce = True, False, 0, None

    def tick(self, now: float) -> None:
        """Detect silence and snapshots that did not arrive; called periodically."""
        if not self.is_silent and now - self._last_message_at > self._silence_s:
            self.is_silent, self._is_synced, self.nonce = True, False, None
            self._report_events_lost()
        elif not self.is_silent and not self._is_synced and now >= self._request_again_at:
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                self._report_events_lost()
            self._request_snapshot(now)

    def restart(self, now: float) -> None:
        """Resync after the listener has failed; not at once, so that a listener which always fails causes no loop."""
        self._is_synced, self.nonce = False, None
        self._request_again_at = now + self._wait_s

    def _apply(self, message: EventsMessage) -> None:
        for kind, hashes in message.changes():
            if kind == STORED:
                self._listener.stored(self._replica, hashes)
            elif kind == REMOVED:
                self._listener.removed(self._replica, hashes)
            elif kind == STATE_STORED:
                self._listener.states_stored(self._replica, hashes)
            elif kind == STATE_REMOVED:
                self._listener.states_removed(self._replica, hashes)
            elif kind == SAVED:
                self._listener.saved(self._replica, hashes)
            elif kind == UNSAVED:
                self._listener.unsaved(self._replica, hashes)
            elif kind == SHARED:
                self._listener.saved(self._replica, hashes, "shared")
            elif kind == UNSHARED:
                self._listener.unsaved(self._replica, hashes, "shared")
            elif kind == CLEARED:
                self._listener.cleared(self._replica)

    def _is_first_batch(self, message: EventsMessage) -> bool:
        """Return whether this is the first batch of an engine whose snapshot said that there was none yet."""
        return self._run_id == 0 and self._next_number == message.number == 0

    def _check_run_id(self, run_id: int, now: float) -> None:
        if self._run_id is None or run_id == self._run_id:
            return
        self._run_id, self._is_synced = run_id, False
        self._listener.cleared(self._replica)
        if self.nonce is None:  # else the pending request reaches the new engine
            self._request_snapshot(now)

    def _on_gap(self, now: float) -> None:
        self._sink.increment(KV_INDEX_GAPS)
        self._is_synced = False
        self._request_snapshot(now)

    @property
    def _wait_s(self) -> float:
        return self._resync_s * min(2.0**self._num_failures, MAX_WAIT_FACTOR)

    def _request_snapshot(self, now: float) -> None:
        self.nonce = secrets.token_hex(NONCE_LENGTH // 2)
        self._request_again_at = now + self._wait_s

    def _message_arrived(self, now: float) -> None:
        self._last_message_at = now
        if self.is_silent:
            self.is_silent = False
            self._request_snapshot(now)

    def _report_events_lost(self) -> None:
        if not self._reported_lost:
            self._reported_lost = True
            self._listener.events_lost(self._replica)
