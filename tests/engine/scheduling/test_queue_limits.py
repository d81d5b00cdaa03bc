"""QueueLimits: which requests may wait, and which are rejected to make room. The tests run no threads."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.engine import Engine
from engine.errors import OverloadedError
from engine.observability import metrics as m
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceGroup
from tests.engine.observability.test_metrics import RecordingSink
from tests.engine.shadow import check_integrity, make_engine, metrics_of

PARAMS = SamplingParams(max_tokens=8)


class Queue:
    """An engine with a limited queue, and the rejected requests; ``is_busy``: the only slot of its batch is taken."""

    def __init__(self, *, is_busy: bool = False, **options: Any) -> None:
        self.sink = RecordingSink()
        self.engine: Engine = make_engine(sink=self.sink, **{"max_num_seqs": 1} | options)[0]
        self.rejected: dict[str, OverloadedError] = {}
        if is_busy:
            self.engine.add_request(EngineRequest("running", [63], PARAMS))
            self.engine.step()

    def arrive(self, name: str, prompt: list[int] | None = None, priority: int = 0, **options: Any) -> SequenceGroup:
        prompt = [len(name), ord(name[-1]) % 64, 1] if prompt is None else prompt
        return self.engine.queue_request(
            EngineRequest(name, prompt, PARAMS, priority=priority, **options), on_rejected=self.rejected.__setitem__
        )

    @property
    def waiting(self) -> list[str]:
        return sorted(group.request_id for group in self.engine.scheduler.waiting)

    @property
    def queued(self) -> int:
        return self.engine.meter.load().queued_prefill_tokens


def test_the_queue_fills_to_its_limit_and_the_error_names_both_numbers() -> None:
    queue = Queue(max_queued_requests=2)
    for name in "abc":  # the first of them has a slot in the batch, and only waits for the step
        queue.arrive(name)
    with pytest.raises(OverloadedError, match=r"3 requests wait .*max_queued_requests=2; try again later") as caught:
        queue.arrive("d")
    assert caught.value.param is None
    assert queue.waiting == ["a", "b", "c"]
    assert "d" not in queue.engine._groups
    queue.engine.step()  # "a" runs now
    with pytest.raises(OverloadedError, match="2 requests wait"):
        queue.arrive("d")
    queue.engine.abort("b")
    queue.arrive("d")
    assert queue.waiting == ["c", "d"]
    assert queue.sink.counters[m.REQUESTS_REJECTED, "overloaded"] == 2


def test_an_early_rejection_makes_no_sequence_and_hashes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(is_busy=True, max_queued_requests=1)
    queue.arrive("a")
    monkeypatch.setattr("engine.engine.SequenceGroup", None)
    monkeypatch.setattr("engine.request.root_hash", None)
    with pytest.raises(OverloadedError):
        queue.arrive("b")


def test_tokens_are_limited_and_an_empty_queue_accepts_any_request() -> None:
    queue = Queue(max_queued_prefill_tokens=50, block_size=4)
    queue.arrive("long", list(range(60)))
    with pytest.raises(OverloadedError, match=r"60 prompt tokens wait .*brings 3 more.*max_queued_prefill_tokens=50"):
        queue.arrive("short")
    queue.engine.step()
    queue.arrive("a", [50 - i for i in range(40)])
    with pytest.raises(OverloadedError, match=r"40 prompt tokens wait .*brings 12 more"):
        queue.arrive("b", [60] * 12)
    queue.arrive("c", [60] * 10)
    queue.arrive("twin", [50 - i for i in range(40)])  # its blocks are those of "a"
    queue.arrive("cached", list(range(60)))
    assert queue.queued == 50


def test_the_lowest_priorities_are_rejected_and_no_more_than_needed() -> None:
    queue = Queue(max_queued_prefill_tokens=40, block_size=4)
    for name, priority, length in (("low", -2, 4), ("mid", -1, 12), ("late", -1, 12), ("peer", 0, 12)):
        queue.arrive(name, [ord(name[0]) % 64] * length, priority)
    queue.arrive("new", [1] * 16, 0)
    assert sorted(queue.rejected) == ["late", "low"]
    assert queue.waiting == ["mid", "new", "peer"]
    assert "of priority -2 made room for one of priority 0" in str(queue.rejected["low"])
    assert "low" not in queue.engine._groups
    assert queue.queued == 40
    assert queue.sink.counters[m.REQUESTS_REJECTED, "overloaded"] == 2
    assert not queue.sink.counters[m.REQUESTS_FINISHED, "abort"]
    check_integrity(queue.engine)


def test_no_request_is_rejected_in_vain() -> None:
    queue = Queue(max_queued_prefill_tokens=40, block_size=4)
    queue.arrive("low", [1] * 8, -1)
    queue.arrive("peer", [2] * 32, 0)
    with pytest.raises(OverloadedError, match="40 prompt tokens wait"):
        queue.arrive("new", [3] * 16, 0)
    assert queue.waiting == ["low", "peer"]
    assert not queue.rejected
    assert queue.queued == 40


def test_a_new_request_counts_in_full_once_its_twin_is_rejected() -> None:
    queue = Queue(is_busy=True, max_queued_prefill_tokens=40, block_size=4, max_queued_requests=2)
    queue.arrive("low", [1] * 8, -1)
    queue.arrive("peer", [2] * 32, 0)
    queue.arrive("twin", [1] * 8, 0)
    assert list(queue.rejected) == ["low"]
    assert queue.queued == 40


def test_resumed_and_preempted_requests_are_never_rejected() -> None:
    queue = Queue(is_busy=True, max_queued_requests=1)
    queue.arrive("resumed", priority=-1, output_token_ids=[5, 6])
    queue.arrive("another", priority=-1, output_token_ids=[5, 6])
    with pytest.raises(OverloadedError):
        queue.arrive("new", priority=3)
    assert queue.waiting == ["another", "resumed"]
    queue = Queue(is_busy=True, max_queued_requests=1)
    group = queue.arrive("preempted", priority=-1)
    group.num_preemptions = 1
    with pytest.raises(OverloadedError):
        queue.arrive("new", priority=3)


def test_without_a_callback_the_queue_has_no_limits() -> None:
    queue = Queue(max_queued_requests=1, max_queued_prefill_tokens=1)
    for i in range(5):
        queue.engine.add_request(EngineRequest(str(i), [1, 2, 3], PARAMS))
    assert len(queue.waiting) == 5


def test_the_error_pickles() -> None:
    error = pickle.loads(pickle.dumps(OverloadedError("full")))
    assert (type(error), str(error), error.param) == (OverloadedError, "full", None)


class QueueMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps and aborts keeps the limits and the priorities."""

    queue: Queue | None = None

    @initialize(
        max_queued_requests=st.none() | st.integers(1, 5),
        max_queued_prefill_tokens=st.none() | st.integers(1, 60),
        num_blocks=st.integers(8, 24),
        num_host_blocks=st.sampled_from([0, 40]),
        max_num_batched_tokens=st.sampled_from([4, 64]),
    )
    def start(self, **options: Any) -> None:
        self.queue = Queue(block_size=4, max_num_seqs=3, **options)
        self.counts: Counter[str] = Counter()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        priority=st.integers(-2, 2),
        is_resumed=st.booleans(),
    )
    def arrive(self, prompt: list[int], priority: int, is_resumed: bool) -> None:
        queue, scheduler = self.queue, self.queue.engine.scheduler
        before, rejected_before, queued_before = list(scheduler.waiting), set(queue.rejected), queue.queued
        self.counts["arrived"] += 1
        name = str(self.counts["arrived"])
        try:
            queue.arrive(name, prompt, priority, output_token_ids=[1] if is_resumed else [])
        except OverloadedError:
            assert not is_resumed
            assert before, "an empty queue rejects"
            assert scheduler.waiting == before
            assert queue.queued <= queued_before, "what was evicted meanwhile may count less, nothing counts more"
            assert name not in queue.engine._groups
            return
        rejected = {group for group in before if group.request_id in queue.rejected.keys() - rejected_before}
        kept = [group for group in before if group not in rejected]
        assert scheduler.waiting.count(queue.engine._groups[name]) == 1
        assert not any(group.has_started for group in rejected), "a request that had started was rejected"
        assert all(group.priority < priority for group in rejected)
        assert all(
            other.priority_key < group.priority_key for group in rejected for other in kept if not other.has_started
        ), "the wrong request is rejected"
        if not is_resumed and kept:
            self.check_limits()
        assert not is_resumed or not rejected

    def check_limits(self) -> None:
        config, num_free_slots = self.queue.engine.config, self.queue.engine.scheduler.queues.num_free_slots
        assert len(self.queue.waiting) <= num_free_slots + (config.max_queued_requests or len(self.queue.waiting))
        assert self.queue.queued <= (config.max_queued_prefill_tokens or self.queue.queued)

    @precondition(lambda self: self.queue is not None and self.queue.engine.has_unfinished)
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.queue.engine.step()

    @precondition(lambda self: self.queue is not None and self.queue.engine.has_unfinished)
    @rule(pick=st.integers(0, 20))
    def abort(self, pick: int) -> None:
        names = list(self.queue.engine._groups)
        assert self.queue.engine.abort(names[pick % len(names)])

    def teardown(self) -> None:
        if self.queue is None:
            return
        engine = self.queue.engine
        check_integrity(engine)
        while engine.has_unfinished:
            engine.step()
        check_integrity(engine)
        assert self.queue.queued == 0
        assert not engine._groups
        assert not metrics_of(engine)._times


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestQueue = QueueMachine.TestCase
