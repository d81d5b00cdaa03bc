"""ReplicaTable: its sums beside those of a shadow, and the measured costs of the latest report."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deployments.routing.cost import Prices, PromptBlocks, prompt_cost
from deployments.routing.options import RoutingOptions
from deployments.routing.replica_table import ReplicaTable
from deployments.transport.request_channel.dispatch import Dispatch
from engine.observability.step_costs import StepCosts
from tests.deployments.routing.dispatches import dispatch_of
from tests.deployments.routing.views import IDLE

PROMPT, PRICES = PromptBlocks(64, [], 16), Prices(0.5, 3.0)

_ACTIONS = ("add", "remove", "report", "sent", "ended", "wait")


@given(st.lists(st.tuples(st.sampled_from(_ACTIONS), st.sampled_from("abc"), st.integers(0, 3)), max_size=60))
def test_the_sums_are_those_of_the_replicas_that_are_left(actions: list[tuple[str, str, int]]) -> None:
    table, now = ReplicaTable(RoutingOptions()), 0.0
    dispatches: list[Dispatch] = []
    for action, name, number in actions:
        now += 0.01
        if action == "wait":
            now += number
        elif action == "add" and name not in table.by_name:
            table.add(name, "abc".index(name))
        elif action == "ended" and dispatches:
            dispatch = dispatches.pop(number % len(dispatches))
            if dispatch.replica in table.by_name:
                table.ended(dispatch)
        elif name in table.by_name:
            if action == "remove":
                table.remove(name)
            elif action == "report":
                table.report(name, replace(IDLE, num_pending=number, num_decoding=2 * number), now)
            elif action == "sent":
                dispatch = dispatch_of([], 10, name)
                dispatch.sent_at, dispatch.num_uncached_tokens = now, 10
                table.sent(dispatch)
                dispatches.append(dispatch)
        if table.by_name:
            table.sample(now)
        pending, decoding = [], []
        any_is_fresh = any(now <= replica.fresh_until for replica in table.by_name.values())
        for replica in table.by_name.values():
            fresh = now <= replica.fresh_until
            pending.append(replica.load.pending(fresh=fresh)[0])
            decoding.append(replica.load.decoding(fresh=fresh)[0])
            assert replica.ranks_last == (any_is_fresh and not fresh and replica.load.report is not None)
        assert (table._pending, table._decoding) == (sum(pending), sum(decoding))
        assert table._busy == sum(number > 0 for number in pending)
        names = sorted(table.by_name)
        costs = table.rows.costs(names[::2], PROMPT, None, PRICES).tolist()
        tiers = table.rows.tiers(())
        for row, (name, cost) in enumerate(zip(table.rows.names, costs, strict=True)):
            if name in names[::2]:
                assert cost == pytest.approx(sum(prompt_cost(table.by_name[name], PROMPT, 0, PRICES)))
                assert table.by_name[name].ranks_last == (tiers is not None and tiers[row] == 1)
            else:
                assert cost == inf
    for name in list(table.by_name):
        table.remove(name)
    assert (table._pending, table._decoding, table._busy) == (0, 0, 0)


def test_the_costs_of_the_latest_report_count() -> None:
    table = ReplicaTable(RoutingOptions())
    table.add("a", 0)
    for now, base_s in ((0.0, 0.02), (1.0, 0.06)):
        table.report("a", replace(IDLE, step_costs=StepCosts(base_s)), now)
        assert table.by_name["a"].step_s == base_s


def test_while_only_short_prompts_were_computed_a_token_costs_what_the_steps_say() -> None:
    """They show no prefill rate. Once any replica has measured one, it is that of all which have not."""
    table = ReplicaTable(RoutingOptions())
    for slot, name in enumerate("ab"):
        table.add(name, slot)
    unmeasured = replace(IDLE, prefill_tokens_per_s=0.0, queued_prefill_tokens=10)
    table.report("a", unmeasured, 0.0)
    assert (table.knows_rates, table.by_name["a"].seconds_per_token) == (False, 1.0)
    table.report("a", replace(unmeasured, step_costs=StepCosts(0.02, 0.005)), 1.0)
    assert table.knows_rates
    assert [table.by_name[name].seconds_per_token for name in "ab"] == [0.005, 0.005]
    assert table.by_name["a"].queue_s == pytest.approx(0.05)
    table.report("b", replace(IDLE, prefill_tokens_per_s=1_000.0), 2.0)
    assert [table.by_name[name].seconds_per_token for name in "ab"] == [0.001, 0.001]


def test_replicas_whose_reports_have_expired_rank_last_while_others_report() -> None:
    table = ReplicaTable(RoutingOptions(stale_after_s=2.0))
    for slot, name in enumerate("abc"):
        table.add(name, slot)

    def last(now: float) -> list[str]:
        table.sample(now)
        return [name for name, replica in table.by_name.items() if replica.ranks_last]

    for now, name in ((0.0, "a"), (0.5, "b"), (2.0, "a")):
        table.report(name, IDLE, now)
    assert last(2.5) == []
    assert last(3.0) == ["b"]
    assert last(5.0) == []  # all have expired
    table.report("b", IDLE, 5.0)
    assert last(5.0) == ["a"]
    table.remove("b")
    assert last(5.0) == []
