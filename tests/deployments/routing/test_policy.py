"""The routing policy, without Ray and without a clock."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deployments.routing import state as state_module
from deployments.routing.options import RoutingOptions
from deployments.routing.state import RoutingState
from engine.observability.load import EngineLoad

IDLE = EngineLoad(0, 0, 0, 1_000, 1_000, 1_000.0, 0.03, 0)
BLOCK_SIZE = 16


def make_state(names: str = "abcd", *, reports: bool = True, now: float = 0.0) -> RoutingState:
    """Return a state whose replicas are idle, empty and connected."""
    state = RoutingState()
    state.set_replicas(list(names))
    for name in names:
        state.replaced(name, [])
        if reports:
            state.report(name, IDLE, now=now)
    return state


def queue(state: RoutingState, name: str, tokens: int, *, now: float = 0.0, waiting: int = 1) -> None:
    state.report(name, replace(IDLE, num_waiting=waiting, queued_prefill_tokens=tokens), now=now)


def first(state: RoutingState, hashes: Sequence[int], names: str = "abcd", *, now: float = 0.0) -> str:
    return state.choose(list(names), hashes, len(hashes) * BLOCK_SIZE, now=now).order[0]


def prompt(number: int, length: int = 8, shared: int = 0) -> list[int]:
    """Return hashes of which the first ``shared`` are common to all prompts."""
    return [*range(shared), *range(1_000 * (number + 1), 1_000 * (number + 1) + length - shared)]


# --- cached prefixes ------------------------------------------------------------------------------------------


def test_the_longest_prefix_wins() -> None:
    state = make_state()
    state.stored("a", [1])
    state.stored("c", [1, 2, 3])
    decision = state.choose(list("abcd"), [1, 2, 3, 4], 64, now=0.0)
    assert decision.order[:2] == ["c", "a"]
    assert (decision.outcome, decision.num_cached_blocks, decision.max_cached_blocks) == ("hit", 3, 3)


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    """With w = 1, computing 64 cached tokens again counts as much as 128 tokens in the queue."""
    state = make_state("ab")
    state.stored("a", [1, 2, 3, 4])
    miss = round(64 * (1 + state.options.miss_weight))
    queue(state, "a", miss - 20)
    assert first(state, [1, 2, 3, 4], "ab") == "a"
    queue(state, "a", miss + 20)
    decision = state.choose(["a", "b"], [1, 2, 3, 4], 64, now=0.0)
    assert (decision.order, decision.outcome) == (["b", "a"], "balanced")
    assert (decision.num_cached_blocks, decision.max_cached_blocks) == (0, 4)


def test_a_crowded_batch_outweighs_a_short_prefix() -> None:
    """Else every stream of a popular short prompt would share one replica's steps while the others idle."""
    state = make_state("ab")
    state.stored("a", [1])
    state.report("a", replace(IDLE, num_running=2), now=0.0)
    assert first(state, [1], "ab") == "a"
    state.report("a", replace(IDLE, num_running=32), now=0.0)
    assert first(state, [1], "ab") == "b"
    assert first(state, [1, *range(100, 100 + 3)], "ab") == "b"
    state.stored("a", list(range(200, 264)))
    assert first(state, list(range(200, 264)), "ab") == "a"  # a thousand cached tokens outweigh the crowded batch


def test_noise_in_the_measured_rates_does_not_concentrate_new_prompts() -> None:
    state = make_state("abcd")
    for name, rate in zip("abcd", (900.0, 1_000.0, 1_100.0, 1_250.0), strict=True):
        state.report(name, replace(IDLE, prefill_tokens_per_s=rate), now=1.0)
    chosen = Counter(first(state, prompt(number), now=1.0) for number in range(200))
    assert min(chosen[name] for name in "abcd") > 20


def test_a_slow_replica_costs_more() -> None:
    state = make_state("ab")
    state.report("a", replace(IDLE, queued_prefill_tokens=100, prefill_tokens_per_s=100.0), now=0.0)
    queue(state, "b", 500)
    assert first(state, prompt(1), "ab") == "b"


def test_a_replica_much_faster_than_the_mean_may_have_a_queue() -> None:
    """A rate within three times the mean counts as the mean, but this one is beyond."""
    state = make_state("abcd")
    for now in (1.0, 2.0):  # the mean follows within a tenth of a second
        for name in "bcd":
            state.report(name, IDLE, now=now)
        state.report("a", replace(IDLE, queued_prefill_tokens=1_000, prefill_tokens_per_s=10_000.0), now=now)
    assert first(state, prompt(1), now=2.0) == "a"
    state.report("a", replace(IDLE, queued_prefill_tokens=1_000, prefill_tokens_per_s=2_000.0), now=3.0)
    assert first(state, prompt(1), now=3.0) != "a"


def test_an_unmeasured_prefill_rate_is_the_mean_of_the_others() -> None:
    state = make_state("ab")
    state.report("a", replace(IDLE, queued_prefill_tokens=100, prefill_tokens_per_s=0.0), now=0.0)
    queue(state, "b", 110)
    assert state.choose(["a", "b"], [], 0, now=0.0).order == ["a", "b"]


def test_of_equals_the_less_crowded_batch_wins() -> None:
    state = make_state("ab")
    state.report("a", replace(IDLE, num_running=9, num_free_blocks=100), now=0.0)
    assert [first(state, [], "ab") for _ in range(4)] == ["b"] * 4


# --- ties and cold prompts ----------------------------------------------------------------------------------------


def test_every_ingress_chooses_the_same_for_any_order_of_candidates() -> None:
    one, other = make_state("abcd"), make_state("dbca")
    for number in range(50):
        assert first(one, prompt(number), "abcd") == first(other, prompt(number), "cadb")


def test_a_lost_replica_moves_only_its_own_prompts() -> None:
    state = make_state()
    before = {number: first(state, prompt(number)) for number in range(200)}
    state.set_replicas(["a", "b", "d"])
    after = {number: first(state, prompt(number), "abd") for number in range(200)}
    assert all(after[number] == name for number, name in before.items() if name != "c")


@pytest.mark.parametrize("shared", [0, 1, 5])
def test_new_prompts_with_a_shared_prefix_spread(shared: int) -> None:
    """In a chat every request shares the system prompt: hashing the first block would send all to one replica."""
    state = make_state()
    for name in "abcd":
        state.stored(name, range(shared))
    chosen = Counter(first(state, prompt(number, shared=shared)) for number in range(400))
    assert min(chosen.values()) > 60


def test_a_burst_of_one_new_prompt_lands_on_one_replica() -> None:
    """Through any ingress, although none knows of the dispatches of the others."""
    ingresses = [make_state() for _ in range(16)]
    chosen = set()
    for step in range(48):
        state = ingresses[step % 16]
        name = first(state, prompt(7))
        state.dispatched(name, prompt(7), 128, now=0.0)
        chosen.add(name)
    assert len(chosen) == 1


def test_a_burst_spills_over_once_its_replica_costs_more_than_a_miss() -> None:
    state = make_state()
    home = first(state, prompt(7))
    state.dispatched(home, prompt(7), 128, now=0.0)
    queue(state, home, 10_000, now=1.0)
    assert first(state, prompt(7), now=1.0) != home


@given(st.lists(st.integers(0, 3_000), min_size=4, max_size=4), st.integers(0, 99), st.integers(1, 40))
def test_a_tie_is_within_the_load_bound(queues: list[int], number: int, length: int) -> None:
    state = make_state()
    for name, tokens in zip("abcd", queues, strict=True):
        queue(state, name, tokens)
    decision = state.choose(list("abcd"), prompt(number, length), length * BLOCK_SIZE, now=0.0)
    miss = (1 + state.options.miss_weight) * length * BLOCK_SIZE
    costs = {name: tokens + miss for name, tokens in zip("abcd", queues, strict=True)}
    assert sorted(decision.order) == list("abcd")
    assert costs[decision.order[0]] <= state.options.load_bound * min(costs.values()) + 1e-6
    rest = [costs[name] for name in decision.order[1:]]
    assert rest == sorted(rest)


def test_prompts_without_hashes_are_routed_by_load_and_equals_take_turns() -> None:
    state = make_state()
    assert Counter(first(state, []) for _ in range(40)) == dict.fromkeys("abcd", 10)
    for name, tokens in zip("abc", (20, 10, 30), strict=True):
        queue(state, name, tokens)
    decision = state.choose(["a", "b", "c"], [], 7, now=0.0)
    assert (decision.order, decision.outcome) == (["b", "a", "c"], "fallback")


# --- avoided replicas and expired reports -----------------------------------------------------


def test_avoided_replicas_are_last_even_if_they_hold_the_prompt() -> None:
    state = make_state()
    state.stored("a", [1, 2])
    decision = state.choose(list("abcd"), [1, 2], 32, now=0.0, avoid=["a"])
    assert (decision.order[-1], decision.outcome) == ("a", "retry")
    assert sorted(state.choose(["a", "b"], [1, 2], 32, now=0.0, avoid=["a", "b"]).order) == ["a", "b"]


def test_a_replica_whose_report_expired_ranks_after_all_but_the_avoided() -> None:
    state = make_state("abc")
    state.stored("a", [1, 2])
    for name in "bc":
        state.report(name, IDLE, now=3.0)
    assert state.choose(list("abc"), [1, 2], 32, now=3.0, avoid=["b"]).order == ["c", "a", "b"]
    state.report("a", IDLE, now=3.1)
    assert first(state, [1, 2], "abc", now=3.1) == "a"


def test_if_all_reports_have_expired_no_replica_ranks_last() -> None:
    state = make_state("abc")
    state.stored("a", [1, 2])
    assert first(state, [1, 2], "abc", now=60.0) == "a"


# --- load ------------------------------------------------------------------------------------


def test_without_reports_the_fewest_dispatched_tokens_win() -> None:
    state = make_state("abc", reports=False)
    for number, (name, tokens) in enumerate([("a", 300), ("b", 100), ("c", 200)]):
        state.dispatched(name, [], tokens, now=0.0, request_id=str(number))
    assert state.choose(list("abc"), [], 50, now=0.0).order == ["b", "c", "a"]
    assert state.total_queued(now=0.0) == (3, 600)
    for _ in range(2):  # completion may be reported twice
        state.ended("a", "0")
    state.ended("c")
    assert state.choose(list("abc"), [], 50, now=9.0).order[-1] == "b"
    assert state.total_queued(now=9.0) == (1, 100)


def test_a_report_includes_dispatches_from_well_before_it() -> None:
    state = make_state("ab", now=0.0)
    transit = state.options.transit_s
    state.dispatched("a", [], 100, now=1.0, request_id="x")
    assert state.total_queued(now=1.0) == (1, 100)
    state.report("a", IDLE, now=1.0 + transit / 2)  # sent before the request arrived
    assert state.total_queued(now=1.1) == (1, 100)
    queue(state, "a", 90, now=1.0 + transit * 2, waiting=1)
    assert state.total_queued(now=1.1) == (1, 90)
    state.dispatched("a", [], 10, now=1.2, request_id="y")
    assert state.total_queued(now=1.2) == (2, 100)
    state.ended("a", "y")
    assert state.total_queued(now=1.2) == (1, 90)


def test_equal_costs_are_a_tie_without_any_tolerance() -> None:
    """Else the order of the candidates, which differs among ingresses, would decide."""
    state = make_state()
    state.options = dataclasses.replace(state.options, load_bound=1.0)
    for number in range(20):
        assert len({first(state, prompt(number), names) for names in ("abcd", "dcba", "cadb")}) == 1


def test_replicas_that_have_measured_no_rate_yet_are_compared_by_their_queues() -> None:
    state = make_state("ab", reports=False)
    for name, tokens in (("a", 500), ("b", 100)):
        state.report(name, replace(IDLE, queued_prefill_tokens=tokens, prefill_tokens_per_s=0.0), now=0.0)
    assert first(state, [], "ab") == first(state, prompt(1), "ab") == "b"


def test_one_queued_token_is_a_queue() -> None:
    state = make_state("a")
    for queued in (replace(IDLE, queued_prefill_tokens=1), replace(IDLE, num_waiting=1)):
        state.report("a", replace(queued, num_steps=1), now=0.0)
        assert state.is_busy("a", now=0.0, within_s=2.0)
        state.report("a", replace(IDLE, num_steps=1), now=0.0)
        assert not state.is_busy("a", now=0.0, within_s=2.0)


def test_a_busy_replica_reports_steps_and_has_a_queue() -> None:
    state = make_state("a")
    busy = replace(IDLE, num_running=1, queued_prefill_tokens=5_000)
    assert not state.is_busy("a", now=0.0, within_s=2.0)  # nothing is queued
    for step in range(40):
        state.report("a", replace(busy, num_steps=step), now=step * 0.1)
    assert state.is_busy("a", now=4.0, within_s=2.0)
    later = 4.0 + 2 * state.options.stale_after_s
    assert not state.is_busy("a", now=later, within_s=2.0)  # silent
    assert not state.is_busy("a", now=later, within_s=30.0)  # its last report has expired, recent as the step may be
    for tick in range(40):
        state.report("a", replace(busy, num_steps=39), now=4.0 + tick * 0.1)
    assert not state.is_busy("a", now=8.0, within_s=2.0)  # it hangs
    assert not state.is_busy("gone", now=8.0, within_s=2.0)


def test_a_removed_replica_is_forgotten_and_late_messages_are_ignored() -> None:
    state = make_state("ab")
    state.stored("a", [1, 2])
    state.dispatched("a", [1, 2, 3], 48, now=0.0, request_id="x")
    state.set_replicas(["b"])
    assert state.replicas == {"b"}
    state.stored("a", [1])
    state.removed("a", [1])
    state.replaced("a", [1])
    state.cleared("a")
    state.events_lost("a")
    state.report("a", IDLE, now=0.0)
    state.dispatched("a", [1, 2, 3], 48, now=0.0, request_id="y")
    state.ended("a", "x")
    assert (len(state.index), state.total_queued(now=0.0)) == (0, (0, 0))


# --- caches ----------------------------------------------------------------------------------


def test_dispatched_blocks_are_assumed_until_they_expire() -> None:
    state = make_state()
    state.dispatched("c", [1, 2, 3], 48, now=0.0, request_id="x")
    state.ended("c", "x")
    assert first(state, [1, 2, 3], now=1.0) == "c"
    later = 1.0 + state.options.assume_s
    state.report("c", IDLE, now=later)
    assert state.choose(list("abcd"), [1, 2, 3], 48, now=later).max_cached_blocks == 0


def test_awaited_blocks_count_as_cached() -> None:
    state = make_state()
    state.awaited("c", [1, 2, 3], now=0.0)
    decision = state.choose(list("abcd"), [1, 2, 3], 48, now=0.0)
    assert (decision.order[0], decision.num_cached_blocks) == ("c", 3)
    state.awaited("gone", [1], now=0.0)
    state.stored("c", [1])
    state.report("a", IDLE, now=1.0 + state.options.assume_s)
    assert state.index.num_cached_blocks([1, 2, 3]) == {"c": 1}


def test_an_unlisted_candidate_counts_like_one_without_a_report() -> None:
    state = make_state("a")
    queue(state, "a", 5_000)
    assert state.choose(["a", "b"], prompt(1), 128, now=0.0).order == ["b", "a"]
    queue(state, "a", 0)
    state.dispatched("b", [], 5_000, now=0.0)
    assert state.choose(["a", "b"], prompt(1), 128, now=0.0).order == ["a", "b"]


def test_a_restart_leaves_nothing_assumed_or_confirmed() -> None:
    state = make_state()
    state.stored("c", [1, 2])
    state.dispatched("c", [1, 2, 3], 48, now=0.0)
    state.cleared("c")
    assert len(state.index) == 0


def test_without_events_a_replica_is_modelled_as_an_lru_cache_of_its_reported_size() -> None:
    state = make_state("a")
    state.report("a", replace(IDLE, num_blocks=4), now=0.0)
    state.stored("a", [1, 2])
    state.events_lost("a")
    state.dispatched("a", [5, 6, 7], 48, now=0.0)
    assert len(state.index) == 4
    assert state.choose(["a"], [5, 6, 7], 48, now=1e6).max_cached_blocks == 3  # a guess does not expire
    state.replaced("a", [8])
    assert state.index.blocks("a") == {8}
    assert len(state.index) == 1


def test_a_replica_that_reports_an_empty_cache_has_events_again() -> None:
    state = make_state("a")
    state.events_lost("a")
    state.cleared("a")
    state.dispatched("a", [5, 6, 7], 48, now=0.0, request_id="x")
    state.ended("a", "x")
    assert state.choose(["a"], [5, 6, 7], 48, now=1.0).max_cached_blocks == 3
    later = 1.0 + state.options.assume_s
    state.report("a", IDLE, now=later)
    assert state.choose(["a"], [5, 6, 7], 48, now=later).max_cached_blocks == 0, "it is not guessed any more"


def test_a_snapshot_is_applied_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions are made in between."""
    monkeypatch.setattr(state_module, "_SLICE", 4)
    state = make_state("a")
    sizes: list[int] = []
    stored = state.index.stored
    monkeypatch.setattr(state.index, "stored", lambda name, hashes: sizes.append(len(hashes)) or stored(name, hashes))
    state.replaced("a", range(10))
    assert (sizes, state.index.blocks("a")) == ([4, 4, 2], set(range(10)))


def test_a_replica_without_any_events_is_modelled_as_an_lru_cache() -> None:
    state = RoutingState()
    state.set_replicas("ab")
    home = first(state, prompt(1), "ab")
    state.dispatched(home, prompt(1), 128, now=0.0)
    assert state.choose(["a", "b"], prompt(1), 128, now=1e6).num_cached_blocks == 8


def test_the_options_are_plain_numbers() -> None:
    assert RoutingState(RoutingOptions(miss_weight=0.0)).options.miss_weight == 0.0
