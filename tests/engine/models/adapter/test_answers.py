"""Greedy tokens and beams of the adapter's engines equal transformers' generate, whatever the engine does meanwhile."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from engine.sampling_params import SamplingParams
from tests.engine.models.adapter.conftest import Inhabitant, Zoo
from tests.engine.models.adapter.tiny_models import TINY_MODELS, VOCAB_SIZE
from tests.engine.oracle import Activity, answers, eos_ids, make_llm, oracle_beams, random_tokens, run

NUM_PROMPTS = 4
PROMPT_TOKENS = 20  # more than twice the window
SHARED_TOKENS = 13
MAX_TOKENS = 6
POOL_TOKENS = 56  # two requests and a bit: others are preempted

# block_size, token budget, prefix caching, swap space in GiB
Setting = tuple[int, int, bool, float]
SETTINGS: list[Setting] = list(product((1, 4, 16), (7, 256), (True, False), (0.0, 0.001)))
# What the settings' full product is computed with: each kind of layer that the adapter knows.
KINDS = ["Gemma2ForCausalLM", "GPT2LMHeadModel", "GptOssForCausalLM", "Olmo3ForCausalLM", "Qwen3MoeForCausalLM"]
FEW = {*KINDS, *sorted(TINY_MODELS)[::3]}  # of `make test`, which compares the logits of all architectures


def make_prompts() -> list[list[int]]:
    """Prompts of one length, which transformers can answer without padding; two begin alike, and two are the same."""
    rng = random.Random(3)
    prompts = [random_tokens(rng, PROMPT_TOKENS, VOCAB_SIZE) for _ in range(NUM_PROMPTS - 1)]
    prompts[1][:SHARED_TOKENS] = prompts[0][:SHARED_TOKENS]
    return [*prompts, list(prompts[-1])]


def oracle(inhabitant: Inhabitant, prompts: list[list[int]]) -> list[list[list[int]]]:
    """Return transformers' greedy tokens, which no end token ends."""
    ids = torch.tensor(prompts)
    with eos_ids(inhabitant.model, []):
        output = inhabitant.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
        )
    return [[row] for row in output[:, PROMPT_TOKENS:].tolist()]


def check(inhabitant: Inhabitant, setting: Setting, expected: list[list[list[int]]]) -> Activity:
    """Compare an engine's answers, to all prompts at once and then to some of them again."""
    block_size, budget, caching, swap_space_gib = setting
    llm = make_llm(
        inhabitant.path,
        model_impl="transformers",
        block_size=block_size,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        swap_space_gib=swap_space_gib,
        num_blocks=POOL_TOKENS // block_size,
    )
    activity = Activity(llm)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompts = make_prompts()
    assert answers(run(llm, prompts, params)) == expected
    again = run(llm, prompts[-1:], params)
    assert answers(again) == expected[-1:]
    assert (again[0].num_cached_tokens > 0) == caching
    return activity


@pytest.mark.parametrize(
    "architecture", [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in TINY_MODELS]
)
def test_greedy_tokens_equal_transformers(zoo: Zoo, architecture: str) -> None:
    inhabitant = zoo(architecture)
    expected = oracle(inhabitant, make_prompts())
    assert len({tuple(one) for (one,) in expected}) > 1, "the oracle's answers are too much alike"
    swap_space_gib = 0.001 if sum(map(ord, architecture)) % 2 else 0.0
    activity = check(inhabitant, (4, 7, True, swap_space_gib), expected)
    assert activity.num_swapped_out if swap_space_gib else activity.num_recomputed


@pytest.mark.long
@pytest.mark.parametrize("architecture", KINDS)
def test_greedy_tokens_in_every_setting(zoo: Zoo, architecture: str) -> None:
    inhabitant = zoo(architecture)
    expected = oracle(inhabitant, make_prompts())
    for setting in SETTINGS:
        check(inhabitant, setting, expected)


@pytest.mark.parametrize(
    "architecture", [name if name in KINDS else pytest.param(name, marks=pytest.mark.long) for name in TINY_MODELS]
)
def test_beams_equal_transformers(zoo: Zoo, architecture: str) -> None:
    inhabitant = zoo(architecture)
    llm = make_llm(inhabitant.path, model_impl="transformers", block_size=4, max_num_batched_tokens=16)
    activity = Activity(llm)
    params = SamplingParams(beam_width=3, n=3, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompts = make_prompts()[:2]
    expected = [oracle_beams(inhabitant.model, prompt, params, [])[0] for prompt in prompts]
    assert answers(run(llm, prompts, params)) == expected
    assert activity.num_copies > 0
