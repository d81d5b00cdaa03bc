"""A seed gives the same tokens alone, in a batch, after a preemption or a swap, and with the cache cold or warm."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.conftest import SavedModel
from tests.engine.oracle import Activity, answers, make_llm, random_tokens, run

# Four requests of each kind make the batch of 32, which takes far more than the small pools hold.
KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8, "min_tokens": 10},
    {"temperature": 1.3, "top_k": 40, "repetition_penalty": 1.2},
    {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 1.0, "logit_bias": {5: 4.0, 6: 3.0, 7: -100.0}, "bad_words_token_ids": ((5, 6), (8,), (6, 6, 5))},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0.9, "n": 3, "top_p": 0.9, "frequency_penalty": 1.0, "stop_token_ids": [9, 10, 11, 12]},
    {"temperature": 1.5, "allowed_token_ids": list(range(3, 60)), "min_tokens": 5, "stop_token_ids": [20, 30]},
]
POOL_TOKENS = 256


def make_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(3)
    shared = random_tokens(rng, 32)
    prompts = [(shared if i % 3 == 0 else []) + random_tokens(rng, rng.randint(1, 30)) for i in range(32)]
    params = [SamplingParams(seed=1000 + 10 * i, max_tokens=28, **KINDS[i % len(KINDS)]) for i in range(32)]
    return prompts, params


@pytest.fixture(scope="module")
def alone(qwen3: SavedModel) -> list[list[list[int]]]:
    llm = make_llm(qwen3.path, enable_prefix_caching=False)
    return [answers(run(llm, [prompt], asked))[0] for prompt, asked in zip(*make_requests(), strict=True)]


def test_a_batch_of_32_gives_the_tokens_of_each_alone(qwen3: SavedModel, alone: list[list[list[int]]]) -> None:
    prompts, params = make_requests()
    assert len({tuple(tokens) for answer in alone for tokens in answer}) == sum(asked.n for asked in params)
    for caching in (True, False):
        llm = make_llm(qwen3.path, enable_prefix_caching=caching)
        cold = run(llm, prompts, params)
        warm = run(llm, prompts, params)
        assert answers(cold) == answers(warm) == alone
        assert (sum(output.num_cached_tokens for output in warm) > 0) == caching
        order = random.Random(9).sample(range(32), 32)
        shuffled = answers(run(llm, [prompts[i] for i in order], [params[i] for i in order]))
        assert shuffled == [alone[i] for i in order]


# `make test` computes four settings, which have each value; `make test-long` all others.
FEW_SETTINGS = [(0.001, 1, True), (0.0, 4, False), (0.00005, 4, True), (0.0, 16, True)]
MORE_SETTINGS = [
    (swap_space_gib, block_size, caching)
    for swap_space_gib, (block_size, caching) in product(
        (0.0, 0.001, 0.00005), ((1, True), (4, False), (4, True), (16, True))
    )
    if (swap_space_gib, block_size, caching) not in FEW_SETTINGS
]


@pytest.mark.parametrize(
    ("swap_space_gib", "block_size", "caching"),
    [*FEW_SETTINGS, *(pytest.param(*setting, marks=pytest.mark.long) for setting in MORE_SETTINGS)],
)
def test_preemption_changes_no_token(
    qwen3: SavedModel, alone: list[list[list[int]]], swap_space_gib: float, block_size: int, caching: bool
) -> None:
    prompts, params = make_requests()
    llm = make_llm(
        qwen3.path,
        block_size=block_size,
        num_blocks=POOL_TOKENS // block_size,
        enable_prefix_caching=caching,
        swap_space_gib=swap_space_gib,
        max_num_batched_tokens=40,
    )
    did = Activity(llm)
    assert answers(run(llm, prompts, params)) == alone  # cold
    assert answers(run(llm, prompts, params)) == alone  # warm
    print(did)
    assert (did.num_swapped_out > 0) == (did.num_swapped_in > 0) == (swap_space_gib > 0)
    assert did.num_recomputed > 0 or swap_space_gib == 0.001  # the smallest host pool has no room for all of them
    assert did.widest_swap == 3 or swap_space_gib != 0.001


def test_priorities_change_no_token(qwen3: SavedModel, alone: list[list[list[int]]]) -> None:
    """Later requests with higher priorities preempt those that run."""
    prompts, params = make_requests()
    llm = make_llm(qwen3.path, block_size=4, num_blocks=POOL_TOKENS // 4, swap_space_gib=0.0003)
    did = Activity(llm)
    got: dict[int, list[list[int]]] = {i: [[] for _ in range(asked.n)] for i, asked in enumerate(params)}
    added = 0
    while added < 32 or llm.engine.has_unfinished:
        if added < 32:
            llm.engine.add_request(EngineRequest(str(added), prompts[added], params[added], priority=added % 5))
            added += 1
        for output in llm.engine.step():
            got[int(output.request_id)][output.index] += output.token_ids
    assert list(got.values()) == alone
    assert did.num_swapped_out > 0


@pytest.mark.parametrize("options", [{"long_prefill_threshold": 7}, {"max_num_seqs": 5}, {"max_num_batched_tokens": 3}])
def test_how_steps_are_cut_changes_no_token(
    qwen3: SavedModel, alone: list[list[list[int]]], options: dict[str, int]
) -> None:
    prompts, params = make_requests()
    assert answers(run(make_llm(qwen3.path, **options), prompts, params)) == alone


def test_every_family_draws_the_same_after_a_swap(family: SavedModel) -> None:
    prompts, params = make_requests()
    plain = answers(run(make_llm(family.path), prompts, params))
    llm = make_llm(family.path, block_size=4, num_blocks=POOL_TOKENS // 4, swap_space_gib=0.0003)
    did = Activity(llm)
    assert answers(run(llm, prompts, params)) == plain
    assert did.num_swapped_out > 0


# --- the prefix cache -----------------------------------------------------------------------------------------------


def test_a_second_turn_hits_the_first_turns_answer(qwen3: SavedModel) -> None:
    rng = random.Random(5)
    llm = make_llm(qwen3.path, block_size=4)
    cold = make_llm(qwen3.path, block_size=4, enable_prefix_caching=False)
    greedy = SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)
    conversation = random_tokens(rng, 10)
    known = 0
    for _ in range(4):
        output = run(llm, [conversation], greedy)[0]
        assert output.num_cached_tokens == known // 4 * 4
        assert answers([output]) == answers(run(cold, [conversation], greedy))
        conversation = conversation + output.outputs[0].token_ids
        known = len(conversation) - 1  # of the last token, K and V were never needed
        conversation += random_tokens(rng, 9)


def test_resetting_the_cache_makes_it_cold_and_harms_nobody(qwen3: SavedModel) -> None:
    rng = random.Random(6)
    llm = make_llm(qwen3.path, block_size=4, num_blocks=36, swap_space_gib=0.001)
    prompt = random_tokens(rng, 40)
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    expected = run(llm, [prompt], greedy)[0]
    assert run(llm, [prompt], greedy)[0].num_cached_tokens == 39
    llm.engine.reset_prefix_cache()
    assert llm.engine.meter.stats().num_cached_blocks == 0
    assert run(llm, [prompt], greedy)[0].num_cached_tokens == 0
    got: dict[str, list[int]] = {}
    for i in range(4):
        llm.engine.add_request(EngineRequest(str(i), prompt, greedy))
        got[str(i)] = []
    did = Activity(llm)
    while llm.engine.has_unfinished:  # while they run and wait, are swapped and share blocks
        for output in llm.engine.step():
            got[output.request_id] += output.token_ids
        llm.engine.reset_prefix_cache()
    assert list(got.values()) == [expected.outputs[0].token_ids] * 4
    assert did.num_swapped_out + did.num_recomputed > 0
