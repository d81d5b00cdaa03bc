"""ReplicaLoad: the queue of a replica, from its reports and from the requests dispatched since."""

from __future__ import annotations

from msgspec.structs import replace

from deployments.routing.replica_load import ReplicaLoad
from deployments.transport.request_channel.dispatch import Dispatch
from engine.observability.load import EngineLoad
from engine.observability.step_costs import StepCosts
from tests.deployments.routing.dispatches import dispatch_of

REPORT = EngineLoad(
    num_running=1,
    num_waiting=2,
    queued_prefill_tokens=300,
    num_blocks=64,
    num_free_blocks=32,
    prefill_tokens_per_s=6500.0,
    num_steps=7,
)


def _send(load: ReplicaLoad, tokens: int, now: float) -> Dispatch:
    dispatch = dispatch_of([], tokens)
    dispatch.sent_at, dispatch.num_uncached_tokens = now, tokens
    load.sent(dispatch)
    return dispatch


def test_without_a_report_our_own_requests_are_the_queue() -> None:
    load = ReplicaLoad()
    dispatches = [_send(load, tokens, now=0.0) for tokens in (10, 200, 3000)]
    assert load.has_dispatches
    assert (load.queued_tokens(fresh=False), load.waiting_requests(fresh=False)) == (3210, 3)
    load.ended(dispatches[1])
    load.ended(dispatches[1])  # it was removed before
    assert (load.queued_tokens(fresh=False), load.waiting_requests(fresh=False)) == (3010, 2)
    load.ended(dispatches[0])
    assert (load.queued_tokens(fresh=False), load.waiting_requests(fresh=False)) == (3000, 1)
    assert load.has_dispatches
    load.ended(dispatches[2])
    assert not load.has_dispatches


def test_a_report_includes_what_was_dispatched_long_enough_before_it() -> None:
    load = ReplicaLoad()
    _send(load, 10, now=1.0)
    late = _send(load, 200, now=2.0)
    load.reported(REPORT, now=2.1, transit_s=0.5)
    assert (load.queued_tokens(fresh=True), load.waiting_requests(fresh=True)) == (500, 3)
    load.ended(late)
    assert (load.queued_tokens(fresh=True), load.waiting_requests(fresh=True)) == (300, 2)
    assert (load.queued_tokens(fresh=False), load.waiting_requests(fresh=False)) == (10, 1)


def test_steps_are_seen_when_their_number_changes() -> None:
    load = ReplicaLoad()
    assert not load.has_stepped_since(0.0)
    load.reported(REPORT, now=1.0, transit_s=0.5)
    assert load.has_stepped_since(1.0)
    load.reported(replace(REPORT, num_steps=8), now=2.0, transit_s=0.5)
    load.reported(replace(REPORT, num_steps=8), now=3.0, transit_s=0.5)
    assert load.has_stepped_since(2.0)
    assert not load.has_stepped_since(2.5)


def test_answers_are_counted_with_those_dispatched_since_the_report() -> None:
    load = ReplicaLoad()
    sent = _send(load, 100, now=1.0)
    assert (load.pending(fresh=True), load.decoding(fresh=True), load.step_costs) == ((1, 100), (0, 0), None)
    report = replace(REPORT, num_pending=3, num_pending_tokens=500, num_decoding=4, num_decoding_tokens=900)
    load.reported(report, now=1.1, transit_s=0.5)
    assert (load.pending(fresh=True), load.decoding(fresh=True)) == ((4, 600), (4, 900))
    assert (load.pending(fresh=False), load.decoding(fresh=False)) == ((1, 100), (0, 0))
    load.ended(sent)
    assert load.pending(fresh=True) == (3, 500)
    sent = _send(load, 100, now=2.0)
    load.reported(replace(report, step_costs=StepCosts(0.1)), now=3.0, transit_s=0.5)
    assert (load.pending(fresh=True), load.step_costs) == ((3, 500), StepCosts(0.1))
    assert load.pending(fresh=False) == (1, 100)
    load.ended(sent)
    assert load.pending(fresh=False) == (0, 0)
