"""Greedy answers of an engine under pressure, to be compared with those of transformers' generate."""

from __future__ import annotations

import random
from itertools import product

import torch
from transformers import PreTrainedModel

from engine.sampling_params import SamplingParams
from tests.engine.models.adapter.tiny_models import VOCAB_SIZE
from tests.engine.models.ties import require_no_ties
from tests.engine.oracle import Activity, answers, eos_ids, make_llm, random_tokens, run

NUM_PROMPTS = 4
PROMPT_TOKENS = 20  # more than twice the window
SHARED_TOKENS = 13
MAX_TOKENS = 6
POOL_TOKENS = 56  # two requests and a bit: others are preempted

# block_size, token budget, prefix caching, swap space in GiB
Setting = tuple[int, int, bool, float]
SETTINGS: list[Setting] = list(product((1, 4, 16), (7, 256), (True, False), (0.0, 0.001)))


def make_prompts() -> list[list[int]]:
    """Prompts of one length, which transformers can answer without padding; two begin alike, and two are the same."""
    rng = random.Random(3)
    prompts = [random_tokens(rng, PROMPT_TOKENS, VOCAB_SIZE) for _ in range(NUM_PROMPTS - 1)]
    prompts[1][:SHARED_TOKENS] = prompts[0][:SHARED_TOKENS]
    return [*prompts, list(prompts[-1])]


def oracle(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[list[int]]]:
    """Return transformers' greedy tokens, which no end token ends."""
    ids = torch.tensor(prompts)
    with eos_ids(model, []):
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)
    require_no_ties(model, output[:, :-1], first=PROMPT_TOKENS - 1)
    return [[row] for row in output[:, PROMPT_TOKENS:].tolist()]


def check(
    path: str,
    setting: Setting,
    expected: list[list[list[int]]],
    *,
    model_impl: str,
    pool_tokens: int = POOL_TOKENS,
) -> Activity:
    """Compare an engine's answers, to all prompts at once and then to some of them again."""
    block_size, budget, caching, swap_space_gib = setting
    llm = make_llm(
        path,
        model_impl=model_impl,
        block_size=block_size,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        swap_space_gib=swap_space_gib,
        num_blocks=pool_tokens // block_size,
        state_snapshot_interval=0,  # so many hits would leave no request to preempt
        typical_seq_len=PROMPT_TOKENS + MAX_TOKENS,  # of each window there are pages for all prompts, also on the host
    )
    activity = Activity(llm)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompts = make_prompts()
    assert answers(run(llm, prompts, params)) == expected
    again = run(llm, prompts[-1:], params)
    assert answers(again) == expected[-1:]
    assert (again[0].num_cached_tokens > 0) == caching
    return activity
