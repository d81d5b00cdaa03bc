"""The rate of each peer: averages of its transfers, of a bounded number of peers."""

from __future__ import annotations

import pytest

from deployments.transport.pages.rates import MAX_PEERS, MIN_RATED_BYTES, PeerRate, PeerRates
from engine.observability.load import MAX_SOURCE_RATES, SourceRate


def test_the_first_transfer_is_taken_as_it_is_and_later_ones_move_it() -> None:
    rates = PeerRates()
    assert rates.get("a") is None
    rates.record("a", 10, 2 * MIN_RATED_BYTES, 0.1, 0.5)
    assert rates.get("a") == PeerRate(0.1, 20, 4 * MIN_RATED_BYTES, 1)
    rates.record("a", 10, 2 * MIN_RATED_BYTES, 0.2, 1.0)
    rate = rates.get("a")
    assert rate is not None
    assert rate.latency_s == pytest.approx(0.13)
    assert rate.bytes_per_s == pytest.approx(3.4 * MIN_RATED_BYTES)
    assert rate.tokens_per_s == pytest.approx(17)
    assert rate.num_transfers == 2


def test_a_short_transfer_says_only_how_long_the_first_page_takes() -> None:
    rates = PeerRates()
    rates.record("a", 10, MIN_RATED_BYTES - 1, 0.1, 1e-6)
    assert rates.get("a") == PeerRate(0.1, 0.0, 0.0, 1)
    rates.record("a", 10, MIN_RATED_BYTES, 0.1, 1.0)
    assert rates.get("a") == PeerRate(0.1, 10, MIN_RATED_BYTES, 2)
    rates.record("a", 10, MIN_RATED_BYTES, 0.1, 0.0)
    assert rates.get("a") == PeerRate(0.1, 10, MIN_RATED_BYTES, 3)


def test_the_least_recently_used_peers_are_forgotten() -> None:
    rates = PeerRates()
    for number in range(MAX_PEERS):
        rates.record(str(number), 1, 1, 0.1, 0.1)
    rates.record("0", 1, 1, 0.1, 0.1)
    rates.record("new", 1, 1, 0.1, 0.1)
    names = [*map(str, range(MAX_PEERS)), "new"]
    assert [name for name in names if rates.get(name) is None] == ["1"]


def test_a_load_report_has_the_peers_that_were_used_last() -> None:
    rates = PeerRates()
    assert rates.latest() == ()
    for number in range(MAX_SOURCE_RATES + 2):
        rates.record(str(number), 10, MIN_RATED_BYTES, 0.5, 2.0)
    rates.record("3", 10, MIN_RATED_BYTES, 0.5, 2.0)
    latest = rates.latest()
    assert [rate.source for rate in latest][:3] == ["3", str(MAX_SOURCE_RATES + 1), str(MAX_SOURCE_RATES)]
    assert len(latest) == MAX_SOURCE_RATES
    assert latest[0] == SourceRate("3", 0.5, 5.0, 2)
