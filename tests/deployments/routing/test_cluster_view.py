"""The view of the replicas while requests start and end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from deployments.observability.ingress_metrics import (
    KV_INDEX_BLOCKS,
    REPLICAS,
    ROUTING_BEST_HIT_TOKENS,
    ROUTING_MEASURED_TTFT,
    ROUTING_PREDICTED_HIT_TOKENS,
    ROUTING_PREDICTED_TTFT,
    ingress_recorder,
)
from deployments.routing.cluster_view import ClusterView
from deployments.routing.policy import Decision
from engine.observability.load import EngineLoad
from engine.observability.metrics import Metric
from tests.deployments.routing.dispatches import dispatch_of, send
from tests.deployments.routing.views import dispatched, make_view

IDLE = EngineLoad(0, 0, 0, 1_000, 1_000, 1_000.0, 1)


def recorded(metric: Metric, *labels: str) -> float:
    """Return the value of a metric of this process."""
    series = ingress_recorder().snapshot()
    return next((sample.value for sample in series if (sample.metric, sample.labels) == (metric, labels)), 0.0)


def test_a_draining_replica_is_observed_until_our_requests_there_end() -> None:
    view = ClusterView()
    view.set_replicas({"r1": {}, "r2": {}})
    first, second = send(view, "r1", [1], 20), send(view, "r1", [1], 20)
    view.set_replicas({"r2": {}})
    assert view.replicas == {"r2"}
    assert view.routing.table.by_name.keys() == {"r1", "r2"}
    view.ended(first)
    assert view.routing.table.by_name.keys() == {"r1", "r2"}
    view.ended(second)
    assert view.routing.table.by_name.keys() == {"r2"}
    view.set_replicas({})
    assert view.routing.table.by_name.keys() == set()


def test_the_gauges_count_replicas_by_state_and_indexed_blocks() -> None:
    view = ClusterView()
    view.set_replicas({"r1": {}, "r2": {}, "r3": {}})
    send(view, "r1", [1, 2], 32)
    view.set_replicas({"r2": {}, "r3": {}})
    view.report_state()
    assert recorded(REPLICAS, "running") == 2
    assert recorded(REPLICAS, "draining") == 1
    assert recorded(KV_INDEX_BLOCKS) == 2


def test_the_time_to_a_first_token_is_recorded_as_predicted_and_as_measured() -> None:
    view = make_view("ab", reports=False)
    before = recorded(ROUTING_PREDICTED_TTFT), recorded(ROUTING_MEASURED_TTFT)
    for knows_rates in (False, True):
        rate = 1_000.0 if knows_rates else 0.0
        view.now += 1.0
        for name in "ab":
            load = replace(IDLE, queued_prefill_tokens=500, prefill_tokens_per_s=rate)
            view.routing.report(name, load, now=view.now)
        for first_token in (None, view.now + 0.75):
            dispatch = dispatch_of([], 100)
            decision = view.choose(dispatch, "ab")
            assert decision is not None
            dispatch.replica = decision.replica
            view.sent(dispatch, decision)
            dispatch.first_token, dispatch.num_tokens = first_token, int(first_token is not None)
            view.ended(dispatch)
            assert view.recently_routed()[-1].measured_s == (None if first_token is None else 0.75)
    assert view.recently_routed()[-1].predicted_s == 0.5 + 0.1
    assert recorded(ROUTING_PREDICTED_TTFT) - before[0] == pytest.approx(0.6)
    assert recorded(ROUTING_MEASURED_TTFT) - before[1] == pytest.approx(0.75)


def test_a_decision_counts_the_hits_of_its_replica_and_the_best_possible_ones() -> None:
    """A long queue makes another replica cheaper than the one that has cached the prompt."""
    view = ClusterView(clock=lambda: 0.0)
    view.set_replicas({"r1": {"block_size": 4}, "r2": {"block_size": 4}})
    view.routing.replaced("r1", [1, 2])
    view.routing.replaced("r2", [1])
    view.routing.report("r1", replace(IDLE, num_waiting=1, queued_prefill_tokens=10_000), now=0.0)
    view.routing.report("r2", IDLE, now=0.0)
    before = recorded(ROUTING_PREDICTED_HIT_TOKENS), recorded(ROUTING_BEST_HIT_TOKENS)
    dispatch = dispatch_of([1, 2, 3], 12)
    decision = view.choose(dispatch, ["r1", "r2"])
    assert decision.replica == "r2"
    assert recorded(ROUTING_PREDICTED_HIT_TOKENS) == before[0] + 4
    assert recorded(ROUTING_BEST_HIT_TOKENS) == before[1] + 8
    dispatch.replica = "r2"
    view.sent(dispatch, decision)
    assert dispatch.num_uncached_tokens == 8
    (routed,) = view.recently_routed()
    assert (routed.replica, routed.outcome, routed.prompt_tokens) == ("r2", "balanced", 12)
    assert (routed.predicted_tokens, routed.best_tokens) == (4, 8)


def test_a_dispatch_counts_in_the_load_of_its_replica_until_it_ends() -> None:
    view = ClusterView()
    view.set_replicas({"r1": {}, "r2": {}})
    first, second = send(view, "r1", [], 16), send(view, "r2", [], 5)
    assert view.queued() == (2, 21)
    view.ended(first)  # r1 has returned it
    assert view.queued() == (1, 5)
    first.replica = "r2"
    view.sent(first, Decision("r2", "cold", 0, 0))
    assert view.queued() == (2, 21)
    for _ in range(2):
        view.ended(first)
        view.ended(second)
    assert view.queued() == (0, 0)
    view.ended(dispatch_of([], 3))  # it never had a replica
    assert view.queued() == (0, 0)


def test_a_beam_search_has_not_stalled_while_its_replica_computes() -> None:
    """Its tokens come together at the end, so that only the steps that its replica reports show that it lives."""
    now = 100.0
    view = ClusterView(clock=lambda: now)
    view.set_replicas({"r1": {}})
    streamed = send(view, "r1", [], 16)
    searched = dispatch_of([], 16, "r1", beam_width=2)
    view.sent(searched, Decision("r1", "cold", 0, 0))
    for number in range(1, 8):
        now = 100.0 + 4.0 * number
        view.routing.report("r1", replace(IDLE, num_running=2, num_steps=number), now=now)
    assert view.stall_allowance(streamed, 8.0) == 0.0
    assert view.stall_allowance(searched, 8.0) == 2.0
    now += 8.1  # without a report
    assert view.stall_allowance(searched, 8.0) == 0.0


def test_a_stall_is_looked_for_in_time() -> None:
    """Soon while the request waits for a replica or in a queue, else when its replica's time is over."""
    now = 100.0
    view = ClusterView(clock=lambda: now)
    view.set_replicas({"r1": {}})
    dispatch = dispatch_of([], 16)
    assert view.stall_allowance(dispatch, 8.0) == 2.0
    dispatch.replica = "r1"
    view.sent(dispatch, Decision("r1", "cold", 0, 0))
    now = 103.0
    assert view.stall_allowance(dispatch, 8.0) == 5.0
    queued = replace(IDLE, num_waiting=1, queued_prefill_tokens=16)
    view.routing.report("r1", queued, now=now)
    view.routing.report("r1", replace(queued, num_steps=2), now=now)
    assert view.stall_allowance(dispatch, 8.0) == 2.0
    view.routing.report("r1", replace(IDLE, num_steps=3), now=now)
    assert view.stall_allowance(dispatch, 8.0) == 5.0
    now = 120.0
    assert view.stall_allowance(dispatch, 8.0) == 0.0
    dispatch.replica = ""  # r1 has returned it
    assert view.stall_allowance(dispatch, 8.0) == 2.0


def test_a_replica_that_takes_nothing_is_passed_over_and_the_others_are_asked_only_then() -> None:
    view = make_view("abc")
    view.routing.stored("b", [1, 2])
    view.routing.stored("c", [1])
    asked: list[str] = []

    def takes(open_ones: str) -> Callable[[str], bool]:
        def ask(name: str) -> bool:
            asked.append(name)
            return name in open_ones

        asked.clear()
        return ask

    dispatch, names = dispatch_of([1, 2], 32), ("a", "b", "c")
    for open_ones, expected, num_asked in (("abc", "b", 1), ("ac", "c", 4), ("a", "a", 4)):
        decision = view.choose(dispatch, names, takes(open_ones))
        assert decision is not None
        assert (decision.replica, len(asked)) == (expected, num_asked)
    assert view.choose(dispatch, names, takes("")) is None


def test_candidates_that_are_unlisted_while_another_replica_is_forgotten_are_known() -> None:
    """Serve's thread unlists replicas before the event loop hears of it."""
    view = make_view("abc")
    handed_over = dispatched(view, "a", [1], 16, now=0.0)
    handed_over.is_handed_over = True
    view.ended(handed_over)
    for listed in ("bc", "c"):
        view.now = 60.0  # the reports of a have expired
        view.set_replicas({name: {} for name in listed})
        decision = view.choose(dispatch_of([1], 16), ("a", "b", "c"))
        assert decision is not None
        assert decision.replica in "abc"
