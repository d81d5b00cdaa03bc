"""ClusterLoad: means over time, and the prices that follow from them."""

from __future__ import annotations

import pytest

from deployments.routing.cluster_load import ClusterLoad


def without_reuse() -> ClusterLoad:
    """Return the load of a cluster whose prompts have shared nothing for long."""
    load = ClusterLoad()
    for _ in range(5_000):
        load.sent(0, 100)
    return load


def test_an_idle_cluster_charges_nothing_for_others() -> None:
    load = without_reuse()
    load.sample(0.0, 0.0, 0.0, now=5.0)
    assert load.prices(None, 30.0).prefill == pytest.approx(0.0, abs=1e-9)


def test_the_price_of_prefill_is_that_of_a_queue() -> None:
    load = without_reuse()
    load.sample(pending=0.6, decoding=15.0, busy=0.5, now=0.0)
    assert load.prices(None, 30.0).prefill == pytest.approx(0.6 / 0.5 + 15 / 30)
    load.sample(pending=9.0, decoding=0.0, busy=1.0, now=1e6)  # the memory is half a minute
    assert load.prices(None, 30.0).prefill == pytest.approx(9.0 / 0.1)


def test_the_means_follow_within_a_minute_however_often_they_are_sampled() -> None:
    often, seldom = without_reuse(), without_reuse()
    for load, interval in ((often, 0.1), (seldom, 10.0)):
        load.sample(0.0, 0.0, 0.0, now=0.0)
        for step in range(1, round(60 / interval) + 1):
            load.sample(1.0, 0.0, 0.0, now=step * interval)
    assert often.prices(None, 30.0).prefill == pytest.approx(1 - 2.718281828**-2, rel=0.01)
    assert seldom.prices(None, 30.0).prefill == pytest.approx(often.prices(None, 30.0).prefill, rel=0.01)


def test_what_a_computed_block_evicts_costs_as_much_as_recent_prompts_have_hit() -> None:
    load = ClusterLoad()
    load.sample(0.0, 0.0, 0.0, now=0.0)
    assert load.prices(None, 30.0).prefill == 1.0
    for cached, expected in ((0, 0.0), (25, 1 / 3), (50, 1.0), (75, 1.0)):
        for _ in range(5_000):
            load.sent(cached, 100 - cached)
        assert load.prices(None, 30.0).prefill == pytest.approx(expected, abs=0.01)


def test_a_clock_that_goes_back_changes_nothing() -> None:
    load = without_reuse()
    load.sample(1.0, 0.0, 0.0, now=10.0)
    load.sample(5.0, 0.0, 0.0, now=9.0)
    assert load.prices(None, 30.0).prefill == pytest.approx(1.0)


def test_the_expected_length_is_the_mean_of_recent_answers_and_at_most_what_is_asked_for() -> None:
    load = without_reuse()
    load.sample(0.0, 0.0, 0.0, now=0.0)
    assert load.prices(None, 1.0).decode == 256.0
    assert load.prices(16, 1.0).decode == 16.0
    for length in (100, 200):
        load.answered(length)
    assert load.answer_tokens == pytest.approx(150)
    for _ in range(500):
        load.answered(50)
    assert load.prices(1_000, 1.0).decode == pytest.approx(50, rel=0.01)


def test_decoding_counts_for_the_prompts_that_will_continue_the_answer() -> None:
    load = ClusterLoad()
    for _ in range(5_000):
        load.sent(75, 25)
    for busy in (0.0, 0.9):  # the number of steps is the same
        load.sample(0.0, 0.0, busy, now=0.0)
        assert load.prices(100, 40.0).decode == pytest.approx((1 + 3) * 100 / 40, rel=0.01)
