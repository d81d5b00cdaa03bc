"""Requests of batches run where no other request feels them, and are paused when others come."""

from __future__ import annotations

import asyncio
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from deployments.requests.background_gate import BACKGROUND_PRIORITY, BackgroundGate
from deployments.requests.generation import Generation
from deployments.requests.prompt import Prompt
from deployments.routing.cluster_view import ClusterView
from deployments.transport.request_channel.dispatch import Dispatch
from engine.observability.load import EngineLoad
from engine.observability.step_costs import StepCosts
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.deployments.fakes import IDLE, FakeText
from tests.deployments.requests.test_dispatcher import Front
from tests.deployments.transport.request_channel.peers import Peers, tokens_of
from tests.engine.async_streams import Gate as StepGate
from tests.waiting import until_in_loop

COSTS = StepCosts(base_s=0.01, prefill_token_s=0.00001, sequence_s=0.0001, kv_token_s=0.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """A gate over one replica."""

    def __init__(self, load: EngineLoad = IDLE, max_slowdown: float = 1.05) -> None:
        self.view, self.clock = ClusterView(clock=lambda: 0.0), Clock()
        self.view.set_replicas({"a": {"block_size": 4}})
        self.report(load)
        self.gate = BackgroundGate(self.view, 20, self.clock, max_slowdown)

    def report(self, load: EngineLoad) -> None:
        self.view.routing.report("a", load, now=0.0)

    def fill(self, num_others: int = 0, most: int = 100, num_tokens: int = 4) -> list[Dispatch]:
        """Send requests while there is room; return them."""
        sent: list[Dispatch] = []
        while len(sent) < most and self.gate.has_room("a", num_others):
            request = EngineRequest(str(len(sent)), [1] * num_tokens, SamplingParams(), priority=BACKGROUND_PRIORITY)
            sent.append(Dispatch(request, replica="a", num_uncached_tokens=num_tokens))
            self.gate.sent(sent[-1], num_others)
        return sent


def test_an_unused_replica_is_filled_up_to_the_limit() -> None:
    one = Gate()
    sent = one.fill()
    assert len(sent) == 20
    assert one.gate.excess("a", 0) == []
    one.gate.ended(sent[0])
    assert len(one.fill()) == 1


def test_beside_others_few_run_and_the_latest_are_paused() -> None:
    one = Gate(replace(IDLE, step_costs=COSTS))
    sent = one.fill()
    # A step of 10 requests takes 11 ms, of which 5% are the time of five more.
    assert one.gate.excess("a", 10) == sent[5:]
    for dispatch in sent[5:]:
        one.gate.ended(dispatch)
    assert (one.gate.excess("a", 10), one.gate.has_room("a", 10)) == ([], False)
    one.gate.ended(sent[0])
    assert one.gate.has_room("a", 10)


def test_until_the_costs_of_steps_are_known_none_runs_beside_others() -> None:
    one = Gate()
    sent = one.fill()
    assert one.gate.excess("a", 1) == sent


def test_others_at_other_ingresses_count() -> None:
    one = Gate(replace(IDLE, step_costs=COSTS))
    sent = one.fill()
    one.gate.num_elsewhere = 10
    assert one.gate.excess("a", 0) == sent[5:]


def test_a_replica_stays_used_for_a_moment() -> None:
    one = Gate()
    assert not one.gate.has_room("a", 1)
    assert not one.gate.has_room("a", 0)
    one.clock.now += 1.0
    assert one.gate.has_room("a", 0)


def test_beside_others_long_prompts_start_one_after_the_other() -> None:
    one = Gate(replace(IDLE, step_costs=COSTS))
    assert len(one.fill(10, num_tokens=1000)) == 1  # 10 ms, as long as a step
    one.clock.now += 2.1  # 200 steps
    assert not one.gate.has_room("a", 10)
    one.clock.now += 0.2
    assert one.gate.has_room("a", 10)
    short = Gate(replace(IDLE, step_costs=COSTS))
    for number in range(5):
        assert len(short.fill(10, num_tokens=40)) == 1, number  # 0.4 ms of the 0.52 that a step may be longer
        short.clock.now += 0.009
    assert not short.gate.has_room("a", 10)


def test_the_slowdown_is_chosen() -> None:
    """A step of 10 requests takes 11 ms; of 1.12 times as long, 12% are the time of 11 more."""
    assert len(Gate(replace(IDLE, step_costs=COSTS), max_slowdown=1.12).fill(10, num_tokens=0)) == 11
    assert len(Gate(replace(IDLE, step_costs=COSTS), max_slowdown=2.0).fill(10, num_tokens=0)) == 20  # the most
    assert Gate(replace(IDLE, step_costs=COSTS), max_slowdown=1.0).fill(10, num_tokens=0) == []


def with_gaps(gap_s: float, max_slowdown: float) -> Gate:
    """Return a gate whose replica has some long gaps between others' tokens beside many short ones."""
    one = Gate(replace(IDLE, step_costs=COSTS), max_slowdown)
    for number in range(30_000):
        one.gate.gaps_of("a").add(gap_s if number % 50 == 0 else 0.01)
    return one


def test_where_some_gaps_are_long_more_run() -> None:
    assert len(with_gaps(0.03, max_slowdown=1.05).fill(10, num_tokens=0)) == 14  # 1.4 ms of 30
    assert len(with_gaps(0.3, max_slowdown=1.05).fill(20, num_tokens=0)) == 20  # the most
    slow = replace(COSTS, sequence_s=0.001)
    one = with_gaps(3.0, max_slowdown=1.05)
    one.report(replace(IDLE, step_costs=slow))
    assert len(one.fill(10, num_tokens=0)) == 10  # half of a step of 20 ms


def test_prompts_that_make_no_step_longer_than_the_longest_start_more_often() -> None:
    one = with_gaps(0.03, max_slowdown=1.2)
    assert len(one.fill(10, num_tokens=1000)) == 1  # 10 ms beside a step of 11: 5% of the time in 200 ms
    one.clock.now += 0.19
    assert not one.gate.has_room("a", 10)
    one.clock.now += 0.02
    assert len(one.fill(10, num_tokens=2500)) == 1  # 25 ms are too long
    one.clock.now += 2.4
    assert not one.gate.has_room("a", 10)
    one.clock.now += 0.2  # 200 steps; half of them have half of that prompt
    assert one.gate.has_room("a", 10)


def test_a_quarter_of_the_blocks_is_left_free() -> None:
    one = Gate(replace(IDLE, num_free_blocks=24))
    assert one.fill() == []
    one.report(replace(IDLE, num_free_blocks=25))
    assert one.fill()


def background(front: Front, number: int, length: int) -> list[Generation]:
    """Return answers to requests of a batch."""
    requests = [
        EngineRequest(f"b{index}", [index + 1] * 5, SamplingParams(max_tokens=length), priority=BACKGROUND_PRIORITY)
        for index in range(number)
    ]
    texts: list[Any] = [FakeText() for _ in requests]
    return [
        Generation(front.dispatcher, request, Prompt(request, []), text)
        for request, text in zip(requests, texts, strict=True)
    ]


async def read(generation: Generation) -> list[int]:
    async for _ in generation.deltas():
        pass
    return generation.token_ids


async def test_they_make_room_for_another_request_and_continue_after_it(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.requests.background_gate._HOLD_S", 0.0)
    front = Front(peers)
    try:
        await front.add("a")
        replica = front.replicas["a"]
        steps = StepGate(replica.runner)
        generations = background(front, 3, 20)
        lines = [asyncio.create_task(read(generation)) for generation in generations]
        await until_in_loop(lambda: all(generation.token_ids for generation in generations), "each has a token")
        other = front.send(length=20)
        await until_in_loop(lambda: all(len(generation.attempts) == 2 for generation in generations), "all are paused")
        again = [generation.attempts[-1] for generation in generations]
        assert [(dispatch.replica, dispatch.deadline) for dispatch in again] == [("", inf)] * 3
        assert [len(dispatch.request.output_token_ids) for dispatch in again] == [
            len(generation.token_ids) for generation in generations
        ]
        assert front.dispatcher.queued()[0] <= 1  # held requests do not count, so they reject no other one
        steps.opened.set()
        assert len(await tokens_of(other)) == 20
        for number, line in enumerate(lines):
            assert await line == replica.answer([number + 1] * 5, 20)
        assert all(dispatch.deadline < inf for dispatch in again)
        assert front.dispatcher.background.is_idle
        await until_in_loop(lambda: replica.is_idle)
    finally:
        front.dispatcher.close()


async def test_they_do_not_hinder_each_other(peers: Peers) -> None:
    """All are sent at once, and the next ones as soon as they are given."""
    front = Front(peers)
    try:
        await front.add("a")
        steps = StepGate(front.replicas["a"].runner)
        requests = [EngineRequest(str(n), [n], SamplingParams(), priority=BACKGROUND_PRIORITY) for n in range(1, 7)]
        for request in requests:
            assert front.dispatcher.send(request, [], avoid=[], deadline=inf).replica == "a"
        steps.opened.set()
    finally:
        front.dispatcher.close()


async def test_they_wait_for_a_first_replica_and_may_be_cancelled(peers: Peers) -> None:
    front = Front(peers)
    try:
        generations = background(front, 2, 5)
        lines = [asyncio.create_task(read(generation)) for generation in generations]
        await until_in_loop(lambda: front.num_wakes == 1, "Serve is woken")
        lines[0].cancel()
        await asyncio.wait(lines[:1])
        await front.add("a")
        assert await lines[1] == front.replicas["a"].answer([2] * 5, 5)
        assert generations[0].attempts[0].replica == ""
    finally:
        front.dispatcher.close()
