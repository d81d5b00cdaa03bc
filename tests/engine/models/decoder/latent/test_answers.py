"""Engines on tiny models with latent attention: tokens and beams equal those of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from engine.errors import ConfigError
from engine.sampling_params import SamplingParams
from tests.engine.models.adapter import greedy_answers
from tests.engine.models.decoder.latent.conftest import Saved
from tests.engine.models.decoder.latent.latent_families import LATENT_FAMILIES
from tests.engine.models.test_speculative_generation import SPECULATION, DraftCounter
from tests.engine.oracle import Activity, answers, eos_ids, make_llm, oracle_beams, random_tokens, run
from tests.engine.worker.test_tensor_parallel import ThreadRanks

FEW = ("deepseek-v2", "deepseek-v3", "deepseek-v3.2", "glm-5.2", "minicpm3")
MOST = [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in LATENT_FAMILIES]


@pytest.mark.parametrize("name", MOST)
def test_greedy_tokens_equal_transformers(saved: Callable[[str], Saved], name: str) -> None:
    """With blocks of 4 tokens, steps of 7, shared prefixes, a cached prompt, and preemption."""
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    assert len({tuple(answer) for (answer,) in expected}) > 1, "the oracle's answers are too much alike"
    activity = greedy_answers.check(saved(name).path, (4, 7, True, 0.0), expected, model_impl="auto")
    assert activity.num_recomputed


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("deepseek-v3", marks=pytest.mark.long),
        pytest.param("glm-5.2", marks=pytest.mark.long),
        pytest.param("mistral-4", marks=pytest.mark.exhaustive("24 settings; CI runs those of DeepSeek V3")),
    ],
)
def test_greedy_tokens_in_every_setting(saved: Callable[[str], Saved], name: str) -> None:
    """Also swapped to the host, and without a prefix cache."""
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    for setting in greedy_answers.SETTINGS:
        greedy_answers.check(saved(name).path, setting, expected, model_impl="auto")


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-5.2"])
def test_latents_that_were_swapped_are_read_again(saved: Callable[[str], Saved], name: str) -> None:
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    activity = greedy_answers.check(saved(name).path, (4, 7, True, 0.001), expected, model_impl="auto")
    assert activity.num_swapped_out


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-5.2"])
def test_drafts_change_no_token(saved: Callable[[str], Saved], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts that repeat themselves, in steps of 40 tokens."""
    drafts = DraftCounter(monkeypatch)
    model = saved(name).model
    prompts = [[7, 8, 9, 10] * 6, [5] * 24, list(range(40, 52)) * 2, random_tokens(random.Random(2), 24)]
    ids = torch.tensor(prompts)
    with eos_ids(model, []):
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    llm = make_llm(saved(name).path, block_size=4, max_num_batched_tokens=40, speculative_config=SPECULATION)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert answers(run(llm, prompts, params)) == [[row[24:].tolist()] for row in expected]
    assert drafts.num_drafted > 0


@pytest.mark.parametrize("name", MOST)
def test_two_ranks_share_a_model(saved: Callable[[str], Saved], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)
    llm = make_llm(saved(name).path, tensor_parallel_size=2, block_size=4, max_num_batched_tokens=16, num_blocks=64)
    params = SamplingParams(temperature=0.0, max_tokens=greedy_answers.MAX_TOKENS, ignore_eos=True)
    prompts = greedy_answers.make_prompts()
    assert answers(run(llm, prompts, params)) == greedy_answers.oracle(saved(name).model, prompts)
    llm.engine.close()


def test_ranks_that_do_not_divide_the_heads_are_refused(saved: Callable[[str], Saved]) -> None:
    with pytest.raises(
        ConfigError, match="tensor_parallel_size=3 does not divide the model's 4 attention heads; choose"
    ):
        make_llm(saved("deepseek-v3").path, tensor_parallel_size=3)


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-5.2", pytest.param("glm-4.7-flash", marks=pytest.mark.long)])
def test_beams_equal_transformers(saved: Callable[[str], Saved], name: str) -> None:
    """Forks copy the block that they share in part."""
    llm = make_llm(saved(name).path, block_size=4, max_num_batched_tokens=16)
    activity = Activity(llm)
    params = SamplingParams(beam_width=3, n=3, temperature=0.0, max_tokens=greedy_answers.MAX_TOKENS, ignore_eos=True)
    prompts = greedy_answers.make_prompts()[:2]
    expected = [oracle_beams(saved(name).model, prompt, params, [])[0] for prompt in prompts]
    assert answers(run(llm, prompts, params)) == expected
    assert activity.num_copies > 0
