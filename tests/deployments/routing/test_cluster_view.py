"""The view of the replicas while requests start and end."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from msgspec.structs import replace

from deployments.observability.ingress_metrics import (
    KV_INDEX_BLOCKS,
    REPLICAS,
    ROUTING_BEST_HIT_TOKENS,
    ROUTING_PREDICTED_HIT_TOKENS,
    ingress_recorder,
)
from deployments.routing.cluster_view import ClusterView
from engine.observability.load import EngineLoad
from engine.observability.metrics import Metric

IDLE = EngineLoad(0, 0, 0, 1_000, 1_000, 1_000.0, 0.03, 1)


def recorded(metric: Metric, *labels: str) -> float:
    """Return the value of a metric of this process."""
    series = ingress_recorder().snapshot()
    return next((one.value for one in series if (one.metric, one.labels) == (metric, labels)), 0.0)


def test_a_request_that_ends_during_its_dispatch_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router may run in a thread of its own."""
    view = ClusterView()
    view.set_replicas({"r1": {}})
    dispatched = view.routing.dispatched
    ending = threading.Thread(target=view.end, args=("id",))

    def end_meanwhile(*args: Any, **kwargs: Any) -> None:
        ending.start()
        ending.join(0.1)
        dispatched(*args, **kwargs)

    monkeypatch.setattr(view.routing, "dispatched", end_meanwhile)
    view.begin("id")
    view.dispatch("id", "r1", [7], 3)
    ending.join()
    assert view.queued() == (0, 0)


def test_a_draining_replica_is_observed_until_our_requests_there_end() -> None:
    view = ClusterView()
    view.set_replicas({"r1": {}, "r2": {}})
    for name in ("a", "b"):
        view.begin(name)
        view.dispatch(name, "r1", [1], 20)
    view.set_replicas({"r2": {}})
    assert view.replicas == {"r2"}
    assert view.routing.replicas == {"r1", "r2"}
    view.end("a")
    assert view.routing.replicas == {"r1", "r2"}
    view.end("b")
    assert view.routing.replicas == {"r2"}
    view.set_replicas({})
    assert view.routing.replicas == frozenset()


def test_the_gauges_count_replicas_by_state_and_indexed_blocks() -> None:
    view = ClusterView()
    view.set_replicas({"r1": {}, "r2": {}, "r3": {}})
    view.begin("a")
    view.dispatch("a", "r1", [1, 2], 32)
    view.set_replicas({"r2": {}, "r3": {}})
    view.report_state()
    assert recorded(REPLICAS, "running") == 2
    assert recorded(REPLICAS, "draining") == 1
    assert recorded(KV_INDEX_BLOCKS) == 2


def test_a_decision_counts_the_hits_of_its_replica_and_the_best_possible_ones() -> None:
    """A long queue makes another replica cheaper than the one that has cached the prompt."""
    view = ClusterView()
    view.set_replicas({"r1": {"block_size": 4}, "r2": {"block_size": 4}})
    view.routing.replaced("r1", [1, 2])
    view.routing.replaced("r2", [1])
    view.routing.report("r1", replace(IDLE, num_waiting=1, queued_prefill_tokens=10_000), now=time.monotonic())
    view.routing.report("r2", IDLE, now=time.monotonic())
    before = recorded(ROUTING_PREDICTED_HIT_TOKENS), recorded(ROUTING_BEST_HIT_TOKENS)
    view.begin("a")
    decision = view.choose(["r1", "r2"], [1, 2, 3], 12, avoid=(), request_id="a")
    assert decision.order == ["r2", "r1"]
    assert recorded(ROUTING_PREDICTED_HIT_TOKENS) == before[0] + 4
    assert recorded(ROUTING_BEST_HIT_TOKENS) == before[1] + 8
    view.dispatch("a", "r2", [1, 2, 3], 12)
    (routed,) = view.recently_routed()
    assert (routed.replica, routed.outcome, routed.prompt_tokens) == ("r2", "balanced", 12)
    assert (routed.predicted_tokens, routed.best_tokens) == (4, 8)


def test_requests_that_their_replicas_return_wait_for_others() -> None:
    view = ClusterView()
    view.set_replicas({"r1": {}})
    for name in ("a", "b", "c"):
        view.begin(name)
        view.dispatch(name, "r1", [], 16)
    assert view.num_unassigned == 0
    for name in ("a", "b", "a"):  # the second time it has no replica
        view.unassign(name)
    assert (view.num_unassigned, view.replica_of("a"), view.replica_of("c")) == (2, "", "r1")
    assert view.queued()[0] == 3


def test_an_unknown_request_may_end() -> None:
    view = ClusterView()
    view.begin("a")
    view.end("another")
    assert view.num_unassigned == 1


def test_a_beam_search_has_not_stalled_while_its_replica_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens come together at the end, so that only the steps that its replica reports show that it lives."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    view = ClusterView()
    view.set_replicas({"r1": {}})
    view.begin("streamed")
    view.begin("searched", streams=False)
    for request_id in ("streamed", "searched"):
        view.dispatch(request_id, "r1", [], 16)
    for number in range(1, 8):
        now = 100.0 + 4.0 * number
        view.routing.report("r1", replace(IDLE, num_running=2, num_steps=number), now=now)
    assert view.stall_allowance("streamed", 8.0) == 0.0
    assert view.stall_allowance("searched", 8.0) == 2.0
    now += 8.1  # without a report
    assert view.stall_allowance("searched", 8.0) == 0.0
    view.end("searched")
    view.begin("searched")  # as after a migration that is no search
    view.dispatch("searched", "r1", [], 16)
    now += 8.1
    assert view.stall_allowance("searched", 8.0) == 0.0


def test_a_stall_is_looked_for_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon while the request waits for a replica or in a queue, else when its replica's time is over."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    view = ClusterView()
    view.set_replicas({"r1": {}})
    view.begin("a")
    assert view.stall_allowance("a", 8.0) == 2.0
    view.dispatch("a", "r1", [], 16)
    now = 103.0
    assert view.stall_allowance("a", 8.0) == 5.0
    queued = replace(IDLE, num_waiting=1, queued_prefill_tokens=16)
    view.routing.report("r1", queued, now=now)
    view.routing.report("r1", replace(queued, num_steps=2), now=now)
    assert view.stall_allowance("a", 8.0) == 2.0
    view.routing.report("r1", replace(IDLE, num_steps=3), now=now)
    assert view.stall_allowance("a", 8.0) == 5.0
    now = 120.0
    assert view.stall_allowance("a", 8.0) == 0.0
