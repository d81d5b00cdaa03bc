"""The cost of a prompt on a replica: its formula, and what is computed whatever is cached."""

from __future__ import annotations

import pytest

from deployments.routing.cost import PromptBlocks, ReplicaCost, prompt_costs

PROMPT = PromptBlocks(64, [1, 2, 3, 4], 16)


def test_a_replica_without_a_queue_costs_the_tokens_that_it_computes() -> None:
    replicas = {"a": ReplicaCost(), "b": ReplicaCost()}
    assert prompt_costs(["a", "b"], replicas, PROMPT, {}, 0.5) == {"a": 1.5 * 64, "b": 1.5 * 64}
    assert prompt_costs(["a", "b"], replicas, PROMPT, {"b": 3}, 0.5) == {"a": 1.5 * 64, "b": 1.5 * 16}


def test_the_last_token_of_a_prompt_is_computed_even_if_all_of_it_is_cached() -> None:
    replica = ReplicaCost()
    replica.update(queued_tokens=100, seconds_per_token=0.01, decode_pressure=2.0, decode_weight=0.25)
    for num_cached in (4, 5):
        costs = prompt_costs(["a"], {"a": replica}, PROMPT, {"a": num_cached}, 0.5)
        assert costs["a"] == pytest.approx(100 * 0.01 + 0.25 * 2.0 + 1.5 * 1 * 0.01)
    empty = PromptBlocks(0, [], 16)
    assert prompt_costs(["a"], {"a": replica}, empty, {}, 0.5)["a"] == pytest.approx(1.5 + 1.5 * 0.01)
