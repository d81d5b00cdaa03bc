"""The rates at which replicas fetch KV, as their reports say."""

from __future__ import annotations

import pytest

from deployments.routing.source_rates import FetchRate, SourceRates
from engine.observability.load import SourceRate

B, C = "tcp://b:1", "tcp://c:1"


def test_a_pair_has_its_own_rate_and_one_that_is_not_measured_that_of_the_replicas_other_peers() -> None:
    rates = SourceRates()
    assert rates.get("a", B) is None
    rates.report(
        "a", [SourceRate(B, 0.25, 100.0), SourceRate(C, 0.75, 50.0), SourceRate("tcp://d:1", 0.1, 0.0)], now=0.0
    )
    assert rates.get("a", B) == FetchRate(0.25, 0.01)
    assert rates.get("a", "tcp://d:1") == rates.get("a", "tcp://e:1") == FetchRate(0.5, pytest.approx(0.015))
    assert rates.get("x", B) == FetchRate(0.5, pytest.approx(0.015))  # the cluster's mean: x has fetched nothing
    rates.report("x", [SourceRate(C, 1.5, 10.0)], now=0.0)
    assert rates.get("x", B) == FetchRate(1.5, 0.1)


@pytest.mark.parametrize("storage", ["disk", "shared"])
def test_storage_says_nothing_of_peers_and_peers_nothing_of_storage(storage: str) -> None:
    rates = SourceRates()
    rates.report("a", [SourceRate(storage, 0.0, 1_000.0)], now=0.0)
    assert rates.get("a", storage) == FetchRate(0.0, 0.001)
    assert rates.get("a", B) is None
    rates.report("x", [SourceRate(B, 0.0, 10.0)], now=0.0)
    assert rates.get("x", storage) is None


def test_a_rate_that_no_transfer_renews_expires_although_reports_repeat_it() -> None:
    rates, old = SourceRates(), SourceRate(B, 0.0, 1.0)
    for now in (0.0, 299.0):
        rates.report("a", [old], now=now)
    assert rates.get("a", B) == FetchRate(0.0, 1.0)
    rates.report("a", [old], now=301.0)
    assert rates.get("a", B) is None
    for now in (302.0, 500.0):  # another transfer has shown the same
        rates.report("a", [SourceRate(B, 0.0, 1.0, int(now))], now=now)
    rates.report("a", [SourceRate(B, 0.0, 1.0, 500)], now=700.0)
    assert rates.get("a", B) == FetchRate(0.0, 1.0)


def test_a_removed_replica_takes_its_rates_along() -> None:
    rates = SourceRates()
    rates.report("a", [SourceRate(B, 0.0, 10.0)], now=0.0)
    rates.remove("a")
    assert rates.get("a", B) is None
    assert rates.get("x", B) is None


def test_the_mean_of_the_cluster_is_that_of_the_latest_reports_of_the_replicas_that_are_left() -> None:
    rates = SourceRates()
    for tokens_per_s in (1.0, 10.0, 20.0):
        for name, factor in (("a", 1.0), ("b", 2.0), ("c", 4.0)):
            rates.report(name, [SourceRate(B, 1 / factor, factor * tokens_per_s)], now=0.0)
    rates.remove("a")
    assert (mean := rates.get("x", B)) is not None
    assert tuple(mean) == pytest.approx(((1 / 2 + 1 / 4) / 2, (1 / 40 + 1 / 80) / 2))


def test_guesses_end_with_the_first_rate_and_become_rare_if_they_show_none() -> None:
    rates, guessed = SourceRates(), []
    for now in range(2_000):
        if rates.may_guess(float(now)):
            guessed.append(now)
            rates.guessed(float(now))
    assert guessed == [0, 10, 30, 70, 150, 310, 630, 1_230, 1_830]
    rates.report("a", [SourceRate(B, 0.0, 10.0)], now=2_000.0)
    assert not rates.may_guess(2_001.0)
    rates.report("a", [SourceRate(B, 0.0, 10.0)], now=2_301.0)  # expired: guesses begin anew
    rates.guessed(2_301.0)
    assert not rates.may_guess(2_310.0)
    assert rates.may_guess(2_311.0)
