"""Greedy tokens and beams of the adapter's engines equal transformers' generate, whatever the engine does meanwhile."""

from __future__ import annotations

import pytest

from engine.sampling_params import SamplingParams
from tests.engine.models.adapter.conftest import Zoo
from tests.engine.models.adapter.greedy_answers import MAX_TOKENS, SETTINGS, check, make_prompts, oracle
from tests.engine.models.adapter.tiny_models import TINY_MODELS
from tests.engine.oracle import Activity, answers, make_llm, oracle_beams, run

# What the settings' full product is computed with: each kind of layer that the adapter knows.
IN_EVERY_SETTING = "GptOssForCausalLM"
KINDS = ["Gemma2ForCausalLM", "GPT2LMHeadModel", IN_EVERY_SETTING, "Olmo3ForCausalLM", "Qwen3MoeForCausalLM"]
FEW = {*KINDS, *sorted(TINY_MODELS)[::3]}  # of `make test`, which compares the logits of all architectures


@pytest.mark.parametrize(
    "architecture", [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in TINY_MODELS]
)
def test_greedy_tokens_equal_transformers(zoo: Zoo, architecture: str) -> None:
    inhabitant = zoo(architecture)
    expected = oracle(inhabitant.model, make_prompts())
    assert len({tuple(answer) for (answer,) in expected}) > 1, "the oracle's answers are too much alike"
    swap_space_gib = 0.001 if sum(map(ord, architecture)) % 2 or architecture == IN_EVERY_SETTING else 0.0
    activity = check(inhabitant.path, (4, 7, True, swap_space_gib), expected, model_impl="transformers")
    if swap_space_gib:
        activity.check_swapped()
    else:
        assert activity.num_recomputed


SWEEP = pytest.mark.exhaustive("24 settings of further kinds; CI runs those of a window in every second layer")


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=pytest.mark.long if name == IN_EVERY_SETTING else SWEEP) for name in KINDS],
)
def test_greedy_tokens_in_every_setting(zoo: Zoo, architecture: str) -> None:
    inhabitant = zoo(architecture)
    expected = oracle(inhabitant.model, make_prompts())
    for setting in SETTINGS:
        check(inhabitant.path, setting, expected, model_impl="transformers")


FURTHER = pytest.mark.exhaustive("beams copy what layers cache: CI has an architecture of each kind of it")


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in KINDS else FURTHER) for name in TINY_MODELS]
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
