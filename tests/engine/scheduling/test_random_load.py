"""Random requests, aborts, failures and cache resets on small pools: each read is right, every answer undisturbed.

The hypothesis state machine explores, and shrinks what it finds; it makes 4,000 steps in `make test`, 6,000 more in CI.
The seeded driver, which has the same rules and the same checks after each step but none of hypothesis' overhead, makes
100,000 and counts them: 5,000 in `make test`, the others in `make test-all`. Then it makes 100,000 with a step in
flight while the next one is scheduled, and every answer must be the same: 5,000 in `make test`, 15,000 more in CI.
"""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceGroup
from tests.engine.random_load import RandomLoad, drive, drive_seeds
from tests.engine.random_requests import Arrival

MAX_TOKENS = st.integers(1, 40) | st.none()
STOP_TOKEN_IDS = st.sampled_from([(), (3,), (1, 2, 3), tuple(range(0, 64, 8))])


@st.composite
def draws(draw: st.DrawFn) -> SamplingParams:
    """Parameters of a request for one answer, or several."""
    max_tokens = draw(MAX_TOKENS)
    n = draw(st.integers(1, 4))
    best_of = draw(st.none() | st.integers(n, 4))
    return SamplingParams(
        temperature=draw(st.sampled_from([0, 1])) if n == 1 and best_of in (None, 1) else 1,
        n=n,
        best_of=best_of,
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens or 10)),
        stop_token_ids=draw(STOP_TOKEN_IDS),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
    )


@st.composite
def searches(draw: st.DrawFn) -> SamplingParams:
    """Parameters of a beam search."""
    width = draw(st.integers(1, 4))
    return SamplingParams(
        temperature=0,
        beam_width=width,
        n=draw(st.integers(1, width)),
        max_tokens=draw(MAX_TOKENS),
        stop_token_ids=draw(STOP_TOKEN_IDS),
        length_penalty=draw(st.sampled_from([1.0, 0.0, -1.0])),
        early_stopping=draw(st.sampled_from([False, True, "never"])),
    )


# Few distinct tokens, so that prompts share prefixes by chance, on top of those that extend an earlier one.
ARRIVALS = st.builds(
    Arrival,
    tokens=st.lists(st.integers(0, 1), min_size=1, max_size=40),
    params=st.builds(SamplingParams, temperature=st.sampled_from([0, 1]), max_tokens=MAX_TOKENS) | draws() | searches(),
    extends=st.none() | st.integers(0, 29),
    salt=st.sampled_from(["", "a"]),
    priority=st.integers(-1, 1),
)
PICKS = st.integers(0, 11)


class EngineMachine(RuleBasedStateMachine):
    """The engine under random load; RandomLoad checks each step and each answer."""

    load: RandomLoad | None = None

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 8]),
        num_blocks=st.integers(3, 40),
        num_host_blocks=st.sampled_from([0, 8, 80]),
        max_num_batched_tokens=st.integers(1, 40),
        max_num_seqs=st.integers(1, 8),
        enable_prefix_caching=st.booleans(),
        long_prefill_threshold=st.sampled_from([0, 3]),
        num_draft_tokens=st.sampled_from([0, 1, 4, 20]),
        free_tokens=st.sampled_from([None, 1, 4, 10]),
    )
    def start(self, **options: object) -> None:
        self.load = RandomLoad(**options)

    @rule(arrival=ARRIVALS, twins=st.integers(1, 3))
    def add(self, arrival: Arrival, twins: int) -> None:
        assert self.load is not None
        for _ in range(twins):
            self.load.add(arrival)

    @precondition(lambda self: self.load is not None and self.load.requests)
    @rule(steps=st.integers(1, 10))
    def step(self, steps: int) -> None:
        assert self.load is not None
        for _ in range(steps):
            if self.load.requests:
                self.load.step()

    @precondition(lambda self: self.load is not None and self.load.requests)
    @rule(pick=PICKS)
    def abort(self, pick: int) -> None:
        assert self.load is not None
        self.load.abort(pick)

    @precondition(lambda self: self.load is not None and self.load.requests)
    @rule(pick=PICKS)
    def end_answer(self, pick: int) -> None:
        assert self.load is not None
        self.load.end_answer(pick)

    @precondition(lambda self: self.load is not None and self.load.requests)
    @rule(pick=PICKS)
    def fail_next(self, pick: int) -> None:
        assert self.load is not None
        self.load.fail_next(pick)

    @rule()
    def reset_prefix_cache(self) -> None:
        assert self.load is not None
        self.load.reset_prefix_cache()

    def teardown(self) -> None:
        if self.load is not None:
            self.load.finish()
            note(f"{self.load.counts}")


class LongEngineMachine(EngineMachine):
    """The same machine with more examples."""


def _settings(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )


EngineMachine.TestCase.settings = _settings(16)
TestEngineMachine = EngineMachine.TestCase
LongEngineMachine.TestCase.settings = _settings(50)
TestLongEngineMachine = pytest.mark.long(LongEngineMachine.TestCase)


# What has to have happened in 100,000 steps, and how often: a load that never swaps says nothing about swapping.
LEAST = {
    "finished": 5000,
    "rejected": 1000,
    "cached": 1000,
    "evicted": 20_000,
    "shared in one step": 300,
    "prefill beside decode": 3000,
    "preempted to recompute": 500,
    "preempted by swap": 300,
    "swapped blocks": 2000,
    "evicted to the host": 2000,
    "loaded from the host": 1000,
    "of a group that comes back": 200,
    "forked": 1000,
    "copied on write": 1000,
    "beam searches": 500,
    "best of several": 100,
    "prompt logprobs": 300,
    "aborted": 200,
    "answers ended from outside": 200,
    "failed": 50,
    "tokens drafted": 5000,
    "tokens from drafts": 2000,
}


@pytest.mark.parametrize(("seed", "free_tokens"), [(338, 1), (43, 4)])
def test_blocks_that_were_matched_are_not_taken_after_a_preemption_has_replaced_them(
    seed: int, free_tokens: int
) -> None:
    """A preempted request published its own blocks instead of cached ones that another request's plan had matched."""
    drive(seed, free_tokens=free_tokens)


# While a step is in flight, most steps compute what it samples, and those without a batch wait for it.
LEAST_OVERLAPPED = {name: least // 3 for name, least in LEAST.items()} | {
    "steps on pending tokens": 10_000,  # those that may get drafts wait for their last token
    "waits for a token": 3000,
    "waits for blocks": 300,
    "wasted": 300,
    "resampled on the host": 400,
}


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_engine_keeps_nothing_of_the_requests_that_have_ended(overlaps: bool) -> None:
    """A server runs for weeks: what the engine refers to after the end of a request would fill its memory."""
    load = drive(7, async_scheduling=overlaps, num_host_blocks=8, enable_prefix_caching=True)
    assert load.counts["finished"] > 10
    engine = load.engine
    del load, engine.runner, engine.block_manager.free  # the tests' own references
    gc.collect()
    kept = [
        referrer
        for referrer in gc.get_referrers(Sequence, SequenceGroup)
        if isinstance(referrer, Sequence | SequenceGroup)
    ]
    assert not kept


def test_five_thousand_random_steps() -> None:
    drive_seeds(0, 5_000, LEAST)


@pytest.mark.exhaustive("minutes of random steps")
def test_ninety_five_thousand_other_random_steps() -> None:
    drive_seeds(1_000, 95_000, LEAST)


@pytest.mark.long
def test_five_thousand_random_steps_that_overlap() -> None:
    drive_seeds(0, 5_000, LEAST_OVERLAPPED, async_scheduling=True)


@pytest.mark.parametrize(
    ("first_seed", "num_steps"),
    [
        pytest.param(1_000, 15_000, marks=pytest.mark.long),
        pytest.param(2_000, 80_000, marks=pytest.mark.exhaustive("more seeds than the 15,000 steps of CI")),
    ],
)
def test_many_other_random_steps_that_overlap(first_seed: int, num_steps: int) -> None:
    drive_seeds(first_seed, num_steps, LEAST_OVERLAPPED, async_scheduling=True)
