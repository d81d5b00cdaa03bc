"""ReplicaFeed: after any gap the listener knows the replica's blocks as last reported, or a part of them."""

from __future__ import annotations

import pytest

from deployments.observability.ingress_metrics import KV_INDEX_GAPS
from deployments.observability.recorder import Recorder
from deployments.transport.hashes import pack_hashes
from deployments.transport.kv_events.feed import ReplicaFeed
from deployments.transport.kv_events.messages import LoadMessage, Snapshot, events_message
from engine.kv.events import KVEvent
from tests.deployments.kv_listener import (
    CLEARED,
    Known,
    batch,
    load,
    removed,
    saved,
    states_removed,
    states_stored,
    stored,
    unsaved,
)


class Feed:
    """A feed with its clock and listener."""

    def __init__(self) -> None:
        self.known, self.recorder, self.now = Known(), Recorder(), 100.0
        self.feed = ReplicaFeed("r", self.known, self.recorder, now=self.now, silence_s=2.0, resync_s=1.0)

    def events(self, number: int, events: tuple[KVEvent, ...], run_id: int = 1) -> None:
        self.feed.events(events_message(batch(number, events, run_id), 0.0), self.now)

    def load(self, number: int, run_id: int = 1) -> None:
        self.feed.load(LoadMessage(run_id, number, load()), self.now)

    def snapshot(
        self,
        number: int,
        *hashes: int,
        run_id: int = 1,
        nonce: str | None = None,
        states: tuple[int, ...] | None = None,
        saved: tuple[int, ...] = (),
        shared: tuple[int, ...] = (),
    ) -> None:
        nonce = nonce or self.feed.nonce
        assert nonce is not None, "no snapshot is requested"
        packed_states = None if states is None else pack_hashes(states)
        message = Snapshot(run_id, number, pack_hashes(hashes), packed_states, pack_hashes(saved), pack_hashes(shared))
        self.feed.snapshot(nonce, message, self.now)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.feed.tick(self.now)

    @property
    def blocks(self) -> set[int]:
        return self.known.blocks["r"]

    @property
    def num_gaps(self) -> float:
        return sum(sample.value for sample in self.recorder.snapshot() if sample.metric is KV_INDEX_GAPS)


@pytest.fixture
def joined() -> Feed:
    feed = Feed()
    feed.snapshot(4, 1, 2)
    return feed


def test_events_before_the_first_snapshot_are_ignored() -> None:
    feed = Feed()
    feed.events(4, stored(9))
    assert not feed.blocks
    feed.snapshot(4, 1, 2)
    assert feed.feed.nonce is None
    feed.events(5, stored(3))
    assert feed.blocks == {1, 2, 3}


def test_events_are_applied_in_order_and_once(joined: Feed) -> None:
    joined.events(5, (*stored(3), *removed(3, 1)))
    joined.events(5, stored(8))  # a duplicate
    joined.events(2, stored(8))  # an old one
    joined.events(6, (*removed(2), *stored(2)))
    assert joined.blocks == {2}
    assert joined.num_gaps == 0


def test_the_states_of_blocks_are_known_from_the_snapshot_and_the_events(joined: Feed) -> None:
    assert joined.known.states == {}
    joined.events(5, (*stored(3), *states_stored(3, 2)))
    joined.events(6, states_removed(2))
    assert joined.known.states == {"r": {3}}
    joined.events(9, stored(9))  # a gap
    joined.snapshot(9, 1, 2, 3, 9, states=(1, 9))
    assert joined.known.states == {"r": {1, 9}}
    joined.events(10, CLEARED)
    assert joined.known.states == {"r": set()}


def test_the_blocks_on_the_disk_are_known_from_the_snapshot_and_the_events(joined: Feed) -> None:
    on_disk = joined.known.on_disk
    joined.events(5, (*saved(1, 2), *removed(1)))
    joined.events(6, unsaved(2))
    assert (on_disk["r"], joined.blocks) == ({1}, {2})
    joined.events(9, saved(9))  # a gap
    joined.snapshot(9, 1, 2, saved=(7, 9))
    assert on_disk["r"] == {7, 9}
    joined.events(10, CLEARED)
    assert on_disk["r"] == set()


def test_the_blocks_in_the_shared_cache_are_known_apart_from_those_on_the_disk(joined: Feed) -> None:
    known = joined.known
    joined.events(5, (*saved(1, 2, storage="shared"), *saved(3)))
    joined.events(6, unsaved(2, storage="shared"))
    assert (known.on_disk["r"], known.on_shared["r"]) == ({3}, {1})
    joined.events(9, saved(9))  # a gap
    joined.snapshot(9, 1, 2, saved=(7,), shared=(8, 9))
    assert (known.on_disk["r"], known.on_shared["r"]) == ({7}, {8, 9})
    joined.events(10, CLEARED)
    assert known.on_shared["r"] == set()


def test_after_a_gap_old_blocks_are_kept_until_the_snapshot(joined: Feed) -> None:
    joined.events(7, stored(7))
    assert joined.feed.nonce is not None
    joined.events(8, stored(8))
    assert joined.blocks == {1, 2}
    assert joined.num_gaps == 1
    joined.snapshot(8, 1, 7, 8)
    joined.events(9, stored(9))
    assert joined.blocks == {1, 7, 8, 9}


def test_a_load_report_reveals_the_loss_of_the_last_batch(joined: Feed) -> None:
    joined.load(4)
    assert joined.feed.nonce is None
    joined.load(5)
    assert joined.feed.nonce is not None
    assert joined.num_gaps == 1


@pytest.mark.parametrize("number", [0, 3])
def test_another_generation_clears_at_once(joined: Feed, number: int) -> None:
    joined.events(number, stored(5), run_id=2)
    assert not joined.blocks
    assert joined.known.count("cleared", "r") == 1
    joined.events(number + 1, stored(6), run_id=2)
    assert not joined.blocks
    assert joined.known.count("cleared", "r") == 1
    joined.snapshot(number + 1, 5, 6, run_id=2)
    assert joined.blocks == {5, 6}


def test_another_generation_is_noticed_before_its_first_events(joined: Feed) -> None:
    joined.load(-1, run_id=0)
    assert not joined.blocks
    joined.snapshot(-1, run_id=0)
    joined.events(0, stored(5), run_id=3)
    assert joined.blocks == {5}
    assert joined.known.count("cleared", "r") == 1


def test_the_first_batch_of_an_engine_needs_no_snapshot() -> None:
    feed = Feed()
    feed.snapshot(-1, run_id=0)
    feed.events(0, stored(5), run_id=77)
    feed.events(1, stored(6), run_id=77)
    assert feed.blocks == {5, 6}
    assert feed.feed.nonce is None


def test_a_missing_snapshot_is_requested_under_another_nonce() -> None:
    feed = Feed()
    first = feed.feed.nonce
    feed.load(4)
    feed.tick(1.1)
    assert feed.feed.nonce not in (first, None)
    assert first is not None
    feed.snapshot(4, 9, nonce=first)  # too late
    assert not feed.blocks
    feed.snapshot(4, 1)
    assert feed.blocks == {1}


def test_a_replica_is_lost_while_its_resync_fails(joined: Feed) -> None:
    joined.events(7, stored(7))
    nonces = set()
    for _ in range(40):
        nonces.add(joined.feed.nonce)
        joined.load(7)
        joined.tick(0.5)
    assert joined.known.count("events_lost", "r") == 1
    assert 4 <= len(nonces) <= 7, "no exponential back-off"
    joined.snapshot(9, 7)
    assert joined.known.calls[-1] == ("replaced", "r")
    assert joined.blocks == {7}


def waits_until_requests(feed: Feed, count: int) -> list[float]:
    """Let snapshots fail to arrive; return the seconds until each of the next ``count`` requests."""
    waits: list[float] = []
    requested_at, nonce = feed.now, feed.feed.nonce
    while len(waits) < count:
        feed.load(0)  # the replica is not silent
        feed.tick(0.25)
        if feed.feed.nonce != nonce:
            waits.append(feed.now - requested_at)
            requested_at, nonce = feed.now, feed.feed.nonce
    return waits


def test_the_wait_for_a_snapshot_doubles_up_to_eight_times_and_starts_again_after_one(joined: Feed) -> None:
    joined.events(7, stored(7))
    assert waits_until_requests(joined, 2) == [1.0, 2.0]
    assert not joined.known.count("events_lost", "r")
    assert waits_until_requests(joined, 1) == [4.0]
    assert joined.known.count("events_lost", "r") == 1, "the third snapshot that does not arrive is a loss"
    assert waits_until_requests(joined, 2) == [8.0, 8.0]
    joined.snapshot(9, 7)
    joined.events(11, stored(8))
    assert waits_until_requests(joined, 2) == [1.0, 2.0]
    assert joined.known.count("events_lost", "r") == 1


def test_silence_is_a_loss_and_the_next_message_requests_a_snapshot(joined: Feed) -> None:
    joined.tick(1.9)
    assert not joined.known.count("events_lost", "r")
    joined.tick(0.2)
    joined.tick(5)
    assert joined.known.count("events_lost", "r") == 1
    assert joined.feed.nonce is None, "it requests a snapshot from a silent replica"
    joined.events(5, stored(5))
    assert joined.blocks == {1, 2}
    joined.snapshot(5, 5)
    assert joined.blocks == {5}
    joined.tick(2.1)
    assert joined.known.count("events_lost", "r") == 2


def test_a_replica_that_never_sends_is_lost() -> None:
    feed = Feed()
    feed.tick(2.1)
    assert feed.known.calls == [("events_lost", "r")]


def test_restart_requests_a_snapshot_after_a_delay(joined: Feed) -> None:
    joined.feed.restart(joined.now)
    assert joined.feed.nonce is None
    joined.load(4)
    joined.tick(1.1)
    joined.snapshot(4, 6)
    assert joined.blocks == {6}
