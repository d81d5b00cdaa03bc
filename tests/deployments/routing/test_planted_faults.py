"""The tests of sources find planted faults, each by the test that is named for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deployments.routing.cluster_load import ClusterLoad
from deployments.routing.kv_index import KVIndex
from deployments.routing.source_finder import SourceFinder
from deployments.routing.source_rates import SourceRates
from deployments.routing.state import RoutingState
from deployments.transport.kv_events.messages import Snapshot
from tests.benchmarks import test_routing_transfers
from tests.deployments.routing import test_source_rates, test_sources
from tests.deployments.transport.kv_events import test_messages

Plant = Callable[[pytest.MonkeyPatch], None]


def assert_found(plant: Plant, check: Callable[[], None]) -> None:
    """Assert that a test passes without the fault, and fails with it."""
    check()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError):
            check()


def test_blocks_that_are_only_assumed_are_pulled() -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(KVIndex, "num_confirmed_blocks", lambda index, replica, hashes, num_blocks: num_blocks)

    assert_found(plant, test_sources.test_what_is_only_assumed_to_be_at_a_peer_is_not_pulled)


def test_a_replica_that_has_failed_stays_a_source() -> None:
    holders = SourceFinder._holders

    def of_all(finder: SourceFinder, prompt: Any, cached: Any, avoid: Any, is_lost: Any, **options: Any) -> Any:
        return holders(finder, prompt, cached, (), is_lost, **options)

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(SourceFinder, "_holders", of_all)

    check = test_sources.test_a_replica_that_has_failed_or_gone_silent_or_serves_no_pages_is_no_source
    assert_found(plant, check)


def test_a_choice_reserves_nothing() -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(RoutingState, "assume", lambda state, replica, hashes, now: None)

    assert_found(plant, test_sources.test_a_twin_follows_where_the_blocks_are_on_their_way)


def test_what_a_fetch_evicts_costs_nothing() -> None:
    prices = ClusterLoad.prices

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(ClusterLoad, "prices", lambda load, *limits: prices(load, *limits)._replace(memory=0.0))

    assert_found(
        plant, test_routing_transfers.test_where_some_replicas_queue_pulls_bring_a_part_of_what_one_pooled_cache_would
    )


def test_every_pair_has_the_mean_rate() -> None:
    get = SourceRates.get

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(SourceRates, "get", lambda rates, replica, source: get(rates, replica, "tcp://unknown:1"))

    assert_found(
        plant,
        test_source_rates.test_a_pair_has_its_own_rate_and_one_that_is_not_measured_that_of_the_replicas_other_peers,
    )


def test_guesses_never_end() -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(SourceRates, "may_guess", lambda rates, now: True)

    assert_found(plant, test_sources.test_one_request_in_many_finds_out_how_fast_peers_are)


def test_the_snapshot_for_a_late_joiner_lacks_the_disk() -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Snapshot, "saved", property(lambda message: ()))

    assert_found(plant, test_messages.test_a_snapshot_with_a_disk_cache_round_trips)


def test_the_snapshot_for_a_late_joiner_lacks_the_shared_cache() -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Snapshot, "shared", property(lambda message: ()))

    assert_found(plant, test_messages.test_a_snapshot_with_a_shared_cache_round_trips)
