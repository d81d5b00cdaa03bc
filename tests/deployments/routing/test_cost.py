"""The cost of a prompt on a replica: its formula, and what is computed whatever is cached."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.cost import Prices, PromptBlocks, ReplicaCost, prompt_cost, prompt_costs
from engine.observability.step_costs import StepCosts

PROMPT = PromptBlocks(64, [1, 2, 3, 4], 16)
COSTS = StepCosts(base_s=0.02, prefill_token_s=0.5, sequence_s=0.003, kv_token_s=0.0001)


def cost_of(replica: ReplicaCost, num_cached: int, prices: Prices, prompt: PromptBlocks = PROMPT) -> float:
    columns = np.array([replica.numbers]).T
    cost = float(prompt_costs(columns, prompt, np.array([float(num_cached)]), prices)[0])
    assert num_cached or prompt_costs(columns, prompt, None, prices)[0] == cost
    return cost


def test_a_replica_without_a_queue_costs_the_tokens_that_it_computes() -> None:
    assert cost_of(ReplicaCost(), 0, Prices(0.5)) == 1.5 * 64
    assert cost_of(ReplicaCost(), 3, Prices(0.5)) == 1.5 * 16


def test_the_last_token_of_a_prompt_is_computed_even_if_all_of_it_is_cached() -> None:
    replica = ReplicaCost()
    replica.update(queued_tokens=100, seconds_per_token=0.01)
    for num_cached in (4, 5):
        assert cost_of(replica, num_cached, Prices(0.5)) == pytest.approx(100 * 0.01 + 1.5 * 1 * 0.01)
    empty = PromptBlocks(0, [], 16)
    assert cost_of(replica, 0, Prices(0.5), empty) == pytest.approx(1.0 + 1.5 * 0.01)


def test_decoding_costs_this_answer_and_those_beside_it() -> None:
    """Counted step by step: everyone's step with this answer, less the others' steps without it."""
    replica, num_answers, num_tokens = ReplicaCost(), 5, 4_000
    replica.update(
        queued_tokens=0, seconds_per_token=0.0, num_answers=num_answers, num_context_tokens=num_tokens, costs=COSTS
    )
    with_it = COSTS.seconds(0, num_answers + 1, num_tokens + PROMPT.num_tokens)
    without = COSTS.seconds(0, num_answers, num_tokens)
    expected = 100 / 30 * (with_it + num_answers * (with_it - without))
    assert cost_of(replica, 0, Prices(0.0, 100 / 30)) == pytest.approx(expected)


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
    whole = cost_of(replica, num_cached, prices)
    assert sum(prompt_cost(replica, PROMPT, num_cached, prices)) == pytest.approx(whole)
