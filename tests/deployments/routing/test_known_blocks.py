"""What the router takes a replica to hold: by its reports, by what was dispatched to it, or by an estimate."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from deployments.routing import state as state_module
from deployments.routing.options import RoutingOptions
from tests.deployments.routing.views import (
    IDLE,
    View,
    choose,
    dispatched,
    first,
    make_view,
    prompt,
    queue,
    queued,
)


def test_a_removed_replica_is_forgotten_and_late_messages_are_ignored() -> None:
    view = make_view("ab")
    view.routing.stored("a", [1, 2])
    early = dispatched(view, "a", [1, 2, 3], 48, now=0.0)
    view.routing.set_replicas(["b"])
    assert view.table.by_name.keys() == {"b"}
    view.routing.stored("a", [1])
    view.routing.removed("a", [1])
    view.routing.replaced("a", [1])
    view.routing.cleared("a")
    view.routing.events_lost("a")
    view.routing.report("a", IDLE, now=0.0)
    dispatched(view, "a", [1, 2, 3], 48, now=0.0)
    view.ended(early)
    assert (len(view.index), queued(view, now=0.0)) == (0, (0, 0))


# --- caches ----------------------------------------------------------------------------------


def test_dispatched_blocks_are_assumed_until_they_expire() -> None:
    view = make_view()
    view.ended(dispatched(view, "c", [1, 2, 3], 48, now=0.0))
    assert first(view, [1, 2, 3], now=1.0) == "c"
    later = 1.0 + view.options.assume_s
    view.routing.report("c", IDLE, now=later)
    assert choose(view, "abcd", [1, 2, 3], 48, now=later).max_cached_blocks == 0


def test_awaited_blocks_count_as_cached() -> None:
    view = make_view()
    view.routing.awaited("c", [1, 2, 3], now=0.0)
    decision = choose(view, "abcd", [1, 2, 3], 48, now=0.0)
    assert (decision.replica, decision.num_cached_blocks) == ("c", 3)
    view.routing.awaited("gone", [1], now=0.0)
    view.routing.stored("c", [1])
    view.routing.report("a", IDLE, now=1.0 + view.options.assume_s)
    assert view.index.num_cached_blocks([1, 2, 3]) == {"c": 1}


def test_an_unlisted_candidate_counts_like_one_without_a_report() -> None:
    view = make_view("a")
    queue(view, "a", 5_000)
    assert choose(view, "ab", prompt(1), 128, now=0.0).replica == "b"
    queue(view, "a", 0)
    dispatched(view, "b", [], 5_000, now=0.0)
    assert choose(view, "ab", prompt(1), 128, now=0.0).replica == "a"


def test_a_restart_leaves_nothing_assumed_or_confirmed() -> None:
    view = make_view()
    view.routing.stored("c", [1, 2])
    dispatched(view, "c", [1, 2, 3], 48, now=0.0)
    view.routing.cleared("c")
    assert len(view.index) == 0


def test_without_events_a_replica_is_modelled_as_an_lru_cache_of_its_reported_size() -> None:
    view = make_view("a")
    view.routing.report("a", replace(IDLE, num_blocks=4), now=0.0)
    view.routing.stored("a", [1, 2])
    view.routing.events_lost("a")
    dispatched(view, "a", [5, 6, 7], 48, now=0.0)
    assert len(view.index) == 4
    assert choose(view, "a", [5, 6, 7], 48, now=1e6).max_cached_blocks == 3  # a guess does not expire
    view.routing.replaced("a", [8])
    assert view.index.blocks("a") == {8}
    assert len(view.index) == 1


def test_a_replica_that_reports_an_empty_cache_has_events_again() -> None:
    view = make_view("a")
    view.routing.events_lost("a")
    view.routing.cleared("a")
    view.ended(dispatched(view, "a", [5, 6, 7], 48, now=0.0))
    assert choose(view, "a", [5, 6, 7], 48, now=1.0).max_cached_blocks == 3
    later = 1.0 + view.options.assume_s
    view.routing.report("a", IDLE, now=later)
    assert choose(view, "a", [5, 6, 7], 48, now=later).max_cached_blocks == 0, "it is not guessed any more"


def test_a_snapshot_is_applied_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions are made in between."""
    monkeypatch.setattr(state_module, "_SLICE", 4)
    view = make_view("a")
    sizes: list[int] = []
    stored = view.index.stored
    monkeypatch.setattr(view.index, "stored", lambda name, hashes: sizes.append(len(hashes)) or stored(name, hashes))
    view.routing.replaced("a", range(10))
    assert (sizes, view.index.blocks("a")) == ([4, 4, 2], set(range(10)))


def test_a_replica_without_any_events_is_modelled_as_an_lru_cache() -> None:
    view = View()
    view.set_replicas({name: {} for name in "ab"})
    home = first(view, prompt(1), "ab")
    dispatched(view, home, prompt(1), 128, now=0.0)
    assert choose(view, "ab", prompt(1), 128, now=1e6).num_cached_blocks == 8


def test_the_options_are_plain_numbers() -> None:
    assert View(RoutingOptions(assume_s=0.5)).options.assume_s == 0.5
