"""The cost of a prompt on a replica: its formula, and what is computed whatever is cached."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.cost import Prices, PromptBlocks, ReplicaCost, prompt_cost, prompt_costs
from engine.observability.step_costs import StepCosts

PROMPT = PromptBlocks(64, [1, 2, 3, 4], 16)
COSTS = StepCosts(base_s=0.02, prefill_token_s=0.5, sequence_s=0.003, kv_token_s=0.0001)


def test_a_replica_without_a_queue_costs_the_tokens_that_it_computes() -> None:
    replicas = {"a": ReplicaCost(), "b": ReplicaCost()}
    assert prompt_costs(["a", "b"], replicas, PROMPT, {}, Prices(0.5)) == {"a": 1.5 * 64, "b": 1.5 * 64}
    assert prompt_costs(["a", "b"], replicas, PROMPT, {"b": 3}, Prices(0.5)) == {"a": 1.5 * 64, "b": 1.5 * 16}


def test_the_last_token_of_a_prompt_is_computed_even_if_all_of_it_is_cached() -> None:
    replica = ReplicaCost()
    replica.update(queued_tokens=100, seconds_per_token=0.01)
    for num_cached in (4, 5):
        costs = prompt_costs(["a"], {"a": replica}, PROMPT, {"a": num_cached}, Prices(0.5))
        assert costs["a"] == pytest.approx(100 * 0.01 + 1.5 * 1 * 0.01)
    empty = PromptBlocks(0, [], 16)
    assert prompt_costs(["a"], {"a": replica}, empty, {}, Prices(0.5))["a"] == pytest.approx(1.0 + 1.5 * 0.01)


def test_decoding_costs_this_answer_and_those_beside_it() -> None:
    """Counted step by step: everyone's step with this answer, less the others' steps without it."""
    replica, num_answers, num_tokens = ReplicaCost(), 5, 4_000
    replica.update(
        queued_tokens=0, seconds_per_token=0.0, num_answers=num_answers, num_context_tokens=num_tokens, costs=COSTS
    )
    with_it = COSTS.seconds(0, num_answers + 1, num_tokens + PROMPT.num_tokens)
    without = COSTS.seconds(0, num_answers, num_tokens)
    expected = 100 / 30 * (with_it + num_answers * (with_it - without))
    assert prompt_costs(["a"], {"a": replica}, PROMPT, {}, Prices(0.0, 100 / 30))["a"] == pytest.approx(expected)


@given(
    st.integers(0, 10**6),
    st.integers(0, 300),
    st.integers(0, 10**7),
    st.integers(0, 5),
    st.floats(0, 50),
    st.floats(0, 50),
)
def test_the_parts_add_up_to_the_cost(
    queued: int, num_answers: int, num_tokens: int, num_cached: int, prefill: float, decode: float
) -> None:
    replica, prices = ReplicaCost(), Prices(prefill, decode)
    replica.update(
        queued_tokens=queued,
        seconds_per_token=0.001,
        num_answers=num_answers,
        num_context_tokens=num_tokens,
        costs=COSTS,
    )
    whole = prompt_costs(["a"], {"a": replica}, PROMPT, {"a": num_cached}, prices)["a"]
    assert sum(prompt_cost(replica, PROMPT, num_cached, prices)) == pytest.approx(whole)
