"""The routing policy, without Ray and without a clock."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deployments.routing.cost import PromptBlocks, prompt_cost
from engine.observability.step_costs import StepCosts
from tests.deployments.routing.dispatches import dispatch_of, send
from tests.deployments.routing.views import (
    BLOCK_SIZE,
    IDLE,
    choose,
    dispatched,
    first,
    make_view,
    prompt,
    queue,
    queued,
    ranked,
)


def test_the_longest_prefix_wins() -> None:
    view = make_view()
    view.routing.stored("a", [1])
    view.routing.stored("c", [1, 2, 3])
    decision = choose(view, "abcd", [1, 2, 3, 4], 64, now=0.0)
    assert decision.replica == "c"
    assert ranked(view, "abcd", [1, 2, 3, 4], 64)[:2] == "ca"
    assert (decision.outcome, decision.num_cached_blocks, decision.max_cached_blocks) == ("hit", 3, 3)


def test_a_queue_outweighs_a_cached_prefix_that_is_computed_sooner() -> None:
    """A computed token also evicts one, which counts as much while nothing is known of this cluster's prompts."""
    view = make_view("ab")
    view.routing.stored("a", [1, 2, 3, 4])
    queue(view, "a", 2 * 64 - 10)
    assert first(view, [1, 2, 3, 4], "ab") == "a"
    queue(view, "a", 2 * 64 + 10)
    decision = choose(view, "ab", [1, 2, 3, 4], 64, now=0.0)
    assert (decision.replica, decision.outcome) == ("b", "balanced")
    assert (decision.num_cached_blocks, decision.max_cached_blocks) == (0, 4)


def test_the_more_requests_a_prefill_delays_the_more_a_cached_prefix_is_worth() -> None:
    for load, expected in ((IDLE, "b"), (replace(IDLE, num_pending=2, num_decoding=80), "a")):
        view = make_view("ab")
        view.routing.stored("a", [1, 2, 3, 4])
        view.routing.report("a", replace(load, queued_prefill_tokens=200), now=0.0)
        view.routing.report("b", load, now=0.0)
        decision = choose(view, "ab", [1, 2, 3, 4], 64, now=0.0)
        assert decision.replica == expected
    assert decision.next_cost_s is not None
    assert sum(decision.cost) < decision.next_cost_s
    assert decision.cost.queue_s == pytest.approx(0.2)
    assert decision.cost.others_s == pytest.approx((2 / 0.1 + 80 / 15 + 1) * decision.cost.prefill_s)


def test_prompts_that_share_nothing_are_sent_where_they_are_computed_first() -> None:
    """That their blocks evict others costs nothing, because those are not used again either."""
    view = make_view("ab")
    for number in range(1_000):
        view.ended(dispatched(view, "b", prompt(number), 128, now=0.0))
    view.routing.stored("a", [1, 2, 3, 4])
    queue(view, "a", 64 + 10)
    assert choose(view, "ab", [1, 2, 3, 4], 64, now=0.0).replica == "b"


def test_the_answers_of_a_crowded_batch_outweigh_a_short_prefix() -> None:
    """Else every stream of a popular short prompt would share one replica's steps while the others idle."""
    view = make_view("ab")
    costs = StepCosts(base_s=0.02, prefill_token_s=0.001, sequence_s=0.0003, kv_token_s=0.000001)
    view.routing.stored("a", [1])
    for number, expected in ((0, "a"), (1, "a"), (3, "b")):
        decoding = replace(IDLE, num_running=number, num_decoding=number, num_decoding_tokens=50 * number)
        view.routing.report("a", replace(decoding, step_costs=costs), now=0.2)
        view.routing.report("b", replace(IDLE, step_costs=costs), now=0.2)
        assert first(view, [1], "ab", now=0.2) == expected
    view.routing.stored("a", list(range(200, 264)))
    assert first(view, list(range(200, 264)), "ab", now=0.2) == "a"  # a thousand cached tokens outweigh the batch


def test_a_short_answer_cares_less_about_the_batch_than_a_long_one() -> None:
    view = make_view("ab")
    costs = StepCosts(base_s=0.02, prefill_token_s=0.001, sequence_s=0.001)
    view.routing.stored("a", [1])
    view.routing.report("a", replace(IDLE, num_running=4, num_decoding=4, step_costs=costs), now=0.2)
    chosen = {}
    for max_tokens in (1, 1_000):
        dispatch = dispatch_of([1], 20, max_tokens=max_tokens)
        chosen[max_tokens] = view.choose(dispatch, ["a", "b"]).replica
    assert chosen == {1: "a", 1_000: "b"}


def test_noise_in_the_measured_rates_does_not_concentrate_new_prompts() -> None:
    view = make_view("abcd")
    for now in (1.0, 1.2):  # the mean follows within a tenth of a second
        for name, rate in zip("abcd", (900.0, 1_000.0, 1_100.0, 1_250.0), strict=True):
            view.routing.report(name, replace(IDLE, prefill_tokens_per_s=rate), now=now)
    chosen = Counter(first(view, prompt(number), now=1.2) for number in range(200))
    assert min(chosen[name] for name in "abcd") > 20


def test_a_slow_replica_costs_more() -> None:
    view = make_view("ab")
    view.routing.report("a", replace(IDLE, queued_prefill_tokens=100, prefill_tokens_per_s=100.0), now=0.0)
    queue(view, "b", 500)
    assert first(view, prompt(1), "ab") == "b"


def test_a_replica_much_faster_than_the_mean_may_have_a_queue() -> None:
    """A rate within a third of the mean counts as the mean, but this one is beyond."""
    view = make_view("abcd")
    for now in (1.0, 2.0):  # the mean follows within a tenth of a second
        for name in "bcd":
            view.routing.report(name, IDLE, now=now)
        view.routing.report("a", replace(IDLE, queued_prefill_tokens=1_000, prefill_tokens_per_s=10_000.0), now=now)
    assert first(view, prompt(1), now=2.0) == "a"
    view.routing.report("a", replace(IDLE, queued_prefill_tokens=1_000, prefill_tokens_per_s=2_000.0), now=3.0)
    assert first(view, prompt(1), now=3.0) != "a"


def test_an_unmeasured_prefill_rate_is_the_mean_of_the_others() -> None:
    view = make_view("ab")
    view.routing.report("a", replace(IDLE, queued_prefill_tokens=100, prefill_tokens_per_s=0.0), now=0.0)
    queue(view, "b", 110)
    assert choose(view, "ab", [], 0, now=0.0).replica == "a"


def test_of_equals_the_less_crowded_batch_wins() -> None:
    view = make_view("ab")
    view.routing.report(
        "a", replace(IDLE, num_running=9, num_decoding=9, step_costs=StepCosts(0.1, 0.0, 0.01)), now=0.2
    )
    assert [first(view, [], "ab") for _ in range(4)] == ["b"] * 4


# --- ties and cold prompts ----------------------------------------------------------------------------------------


def test_every_ingress_chooses_the_same_for_any_order_of_candidates() -> None:
    view, other = make_view("abcd"), make_view("dbca")
    for number in range(50):
        assert first(view, prompt(number), "abcd") == first(other, prompt(number), "cadb")


def test_the_same_candidates_are_looked_up_again_when_replicas_come_and_go() -> None:
    """A new replica takes the row of one that is gone, between two decisions for the same tuple."""
    view, names = make_view("abc"), ("b", "c")
    for number in range(20):
        assert view.choose(dispatch_of(prompt(number), 128), names).replica in names
    view.set_replicas({name: {} for name in "acd"})  # "d" takes the row of "b"
    for name in "acd":
        view.routing.report(name, IDLE, now=0.0)
    assert {view.choose(dispatch_of(prompt(number), 128), ("c", "d")).replica for number in range(20)} == {"c", "d"}
    assert view.choose(dispatch_of(prompt(1), 128), names).replica in names  # "b" is unknown, but takes requests


def test_a_lost_replica_moves_only_its_own_prompts() -> None:
    view = make_view()
    before = {number: first(view, prompt(number)) for number in range(200)}
    view.set_replicas({name: {} for name in "abd"})
    after = {number: first(view, prompt(number), "abd") for number in range(200)}
    assert all(after[number] == name for number, name in before.items() if name != "c")


@pytest.mark.parametrize("shared", [0, 1, 5])
def test_new_prompts_with_a_shared_prefix_spread(shared: int) -> None:
    """In a chat every request shares the system prompt: hashing the first block would send all to one replica."""
    view = make_view()
    for name in "abcd":
        view.routing.stored(name, range(shared))
    chosen = Counter(first(view, prompt(number, shared=shared)) for number in range(400))
    assert min(chosen.values()) > 60


def test_a_burst_of_one_new_prompt_lands_on_one_replica() -> None:
    """Through any ingress, although none knows of the dispatches of the others."""
    ingresses = [make_view() for _ in range(16)]
    chosen = set()
    for step in range(48):
        view = ingresses[step % 16]
        decision = choose(view, "abcd", prompt(7), 128)
        send(view, decision.replica, prompt(7), 128, num_cached=decision.num_cached_blocks)
        chosen.add(decision.replica)
    assert len(chosen) == 1


def test_a_burst_spills_over_once_its_replica_costs_more_than_a_miss() -> None:
    view = make_view()
    home = first(view, prompt(7))
    dispatched(view, home, prompt(7), 128, now=0.0)
    queue(view, home, 10_000, now=1.0)
    assert first(view, prompt(7), now=1.0) != home


@given(st.lists(st.integers(0, 3_000), min_size=4, max_size=4), st.integers(0, 99), st.integers(1, 40))
def test_a_tie_is_within_a_fifth_of_a_percent(queues: list[int], number: int, length: int) -> None:
    view = make_view()
    for name, tokens in zip("abcd", queues, strict=True):
        queue(view, name, tokens)
    decision = choose(view, "abcd", prompt(number, length), length * BLOCK_SIZE, now=0.0)
    costs = {name: tokens + length * BLOCK_SIZE for name, tokens in zip("abcd", queues, strict=True)}
    assert costs[decision.replica] <= 1.002 * min(costs.values()) + 1e-6
    others = [cost for name, cost in costs.items() if name != decision.replica]
    assert decision.next_cost_s is not None
    assert decision.next_cost_s - sum(decision.cost) == pytest.approx((min(others) - costs[decision.replica]) / 1_000)


@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 8), st.sampled_from(["fresh", "expired", "avoided"])),
        min_size=1,
        max_size=9,
    ),
    st.permutations("abcdefghi"),
)
def test_the_choice_is_that_of_a_readable_policy(replicas: list[tuple[int, int, str]], names: list[str]) -> None:
    view, hashes = make_view("abcdefghi"), prompt(1)
    tiers = dict[str, int]()
    for name, (tokens, depth, state) in zip(names, replicas, strict=False):
        view.routing.stored(name, hashes[:depth])
        queue(view, name, tokens, now=0.0 if state == "expired" else 9.0)
        tiers[name] = {"fresh": 0, "expired": 1, "avoided": 2}[state]
    if all(state == "expired" for _, _, state in replicas):
        for name in names[len(replicas) :]:  # others report
            queue(view, name, 0, now=9.0)
    avoid = [name for name, tier in tiers.items() if tier == 2]
    candidates = "".join(tiers)
    decision = choose(view, candidates, hashes, 8 * BLOCK_SIZE, now=9.0, avoid=avoid)
    held = view.routing.num_cached_blocks(PromptBlocks(8 * BLOCK_SIZE, hashes, BLOCK_SIZE))
    prices = view.table.cluster.prices(None, view.options.first_token_weight)
    ranks = {
        name: (
            2 if name in avoid else int(view.table.by_name[name].ranks_last),
            sum(
                prompt_cost(view.table.by_name[name], PromptBlocks(128, hashes, BLOCK_SIZE), held.get(name, 0), prices)
            ),
        )
        for name in candidates
    }
    tier, cost = min(ranks.values())
    chosen_tier, chosen_cost = ranks.pop(decision.replica)
    assert (chosen_tier, decision.num_cached_blocks) == (tier, held.get(decision.replica, 0))
    assert chosen_cost <= cost * 1.002 + 1e-9
    assert sum(decision.cost) == pytest.approx(chosen_cost)
    if ranks:
        assert decision.next_cost_s == pytest.approx(min(ranks.values())[1])
    else:
        assert decision.next_cost_s is None


def test_prompts_without_hashes_are_routed_by_load_and_equals_take_turns() -> None:
    view = make_view()
    assert Counter(first(view, []) for _ in range(40)) == dict.fromkeys("abcd", 10)
    assert Counter(first(view, [], "ad") for _ in range(40)) == dict.fromkeys("ad", 20)  # rows between them take none
    for name, tokens in zip("abc", (20, 10, 30), strict=True):
        queue(view, name, tokens)
    decision = choose(view, "abc", [], 7, now=0.0)
    assert (decision.replica, decision.outcome) == ("b", "fallback")
    assert ranked(view, "abc", [], 7) == "bac"


# --- avoided replicas and expired reports -----------------------------------------------------


def test_avoided_replicas_are_last_even_if_they_hold_the_prompt() -> None:
    view = make_view()
    view.routing.stored("a", [1, 2])
    decision = choose(view, "abcd", [1, 2], 32, now=0.0, avoid=["a"])
    assert decision.outcome == "retry"
    assert ranked(view, "abcd", [1, 2], 32, avoid=["a"])[-1] == "a"
    assert choose(view, "ab", [1, 2], 32, now=0.0, avoid=["a", "b"]).replica == "a"


def test_a_replica_whose_report_expired_ranks_after_all_but_the_avoided() -> None:
    view = make_view("abc")
    view.routing.stored("a", [1, 2])
    for name in "bc":
        view.routing.report(name, IDLE, now=3.0)
    assert ranked(view, "abc", [1, 2], 32, now=3.0, avoid=["b"]) == "cab"
    view.routing.report("a", IDLE, now=3.1)
    assert first(view, [1, 2], "abc", now=3.1) == "a"


def test_if_all_reports_have_expired_no_replica_ranks_last() -> None:
    view = make_view("abc")
    view.routing.stored("a", [1, 2])
    assert first(view, [1, 2], "abc", now=60.0) == "a"


# --- load ------------------------------------------------------------------------------------


def test_without_reports_the_fewest_dispatched_tokens_win() -> None:
    view = make_view("abc", reports=False)
    sent = {name: dispatched(view, name, [], tokens, now=0.0) for name, tokens in (("a", 300), ("b", 100), ("c", 200))}
    assert ranked(view, "abc", [], 50) == "bca"
    assert queued(view, now=0.0) == (3, 600)
    for _ in range(2):  # completion may be reported twice
        view.ended(sent["a"])
    view.ended(sent["c"])
    assert ranked(view, "abc", [], 50, now=9.0)[-1] == "b"
    assert queued(view, now=9.0) == (1, 100)


def test_a_report_includes_dispatches_from_well_before_it() -> None:
    view = make_view("ab", now=0.0)
    transit = view.options.transit_s
    dispatched(view, "a", [], 100, now=1.0)
    assert queued(view, now=1.0) == (1, 100)
    view.routing.report("a", IDLE, now=1.0 + transit / 2)  # sent before the request arrived
    assert queued(view, now=1.1) == (1, 100)
    queue(view, "a", 90, now=1.0 + transit * 2, waiting=1)
    assert queued(view, now=1.1) == (1, 90)
    last = dispatched(view, "a", [], 10, now=1.2)
    assert queued(view, now=1.2) == (2, 100)
    view.ended(last)
    assert queued(view, now=1.2) == (1, 90)


def test_replicas_that_have_measured_no_rate_yet_are_compared_by_their_queues() -> None:
    view = make_view("ab", reports=False)
    for name, tokens in (("a", 500), ("b", 100)):
        view.routing.report(name, replace(IDLE, queued_prefill_tokens=tokens, prefill_tokens_per_s=0.0), now=0.0)
    assert first(view, [], "ab") == first(view, prompt(1), "ab") == "b"


def test_one_queued_token_is_a_queue() -> None:
    view = make_view("a")
    for load in (replace(IDLE, queued_prefill_tokens=1), replace(IDLE, num_waiting=1)):
        view.routing.report("a", replace(load, num_steps=1), now=0.0)
        assert view.table.is_busy("a", now=0.0, within_s=2.0)
        view.routing.report("a", replace(IDLE, num_steps=1), now=0.0)
        assert not view.table.is_busy("a", now=0.0, within_s=2.0)


def test_a_busy_replica_reports_steps_and_has_a_queue() -> None:
    view = make_view("a")
    busy = replace(IDLE, num_running=1, queued_prefill_tokens=5_000)
    assert not view.table.is_busy("a", now=0.0, within_s=2.0)  # nothing is queued
    for step in range(40):
        view.routing.report("a", replace(busy, num_steps=step), now=step * 0.1)
    assert view.table.is_busy("a", now=4.0, within_s=2.0)
    later = 4.0 + 2 * view.options.stale_after_s
    assert not view.table.is_busy("a", now=later, within_s=2.0)  # silent
    assert not view.table.is_busy(
        "a", now=later, within_s=30.0
    )  # its last report has expired, recent as the step may be
    for tick in range(40):
        view.routing.report("a", replace(busy, num_steps=39), now=4.0 + tick * 0.1)
    assert not view.table.is_busy("a", now=8.0, within_s=2.0)  # it hangs
    assert not view.table.is_busy("gone", now=8.0, within_s=2.0)
