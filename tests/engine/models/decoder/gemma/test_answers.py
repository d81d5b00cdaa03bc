"""Engines on tiny models of Gemma 4's kinds: tokens and beams equal those of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from engine.errors import ConfigError
from engine.sampling_params import SamplingParams
from tests.engine.models.adapter import greedy_answers
from tests.engine.models.decoder.gemma.conftest import Saved
from tests.engine.models.decoder.gemma.gemma_families import GEMMA_FAMILIES
from tests.engine.models.test_speculative_generation import SPECULATION, DraftCounter
from tests.engine.oracle import Activity, answers, eos_ids, make_llm, oracle_beams, random_tokens, run
from tests.engine.worker.test_tensor_parallel import ThreadRanks


def few(*names: str) -> list[object]:
    """Return all kinds as parameters of a test; all but ``names`` are left to the long tests."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.long) for name in GEMMA_FAMILIES]


@pytest.mark.parametrize("name", GEMMA_FAMILIES)
def test_greedy_tokens_equal_transformers(saved: Callable[[str], Saved], name: str) -> None:
    """With blocks of 4 tokens, steps of 7, shared prefixes, a cached prompt, and preemption."""
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    assert len({tuple(answer) for (answer,) in expected}) > 1, "the oracle's answers are too much alike"
    for swap_space_gib in (0.0, 0.001):
        setting = (4, 7, True, swap_space_gib)
        activity = greedy_answers.check(saved(name).path, setting, expected, model_impl="pagoda")
        assert activity.num_swapped_out if swap_space_gib else activity.num_recomputed


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gemma-4-e4b", marks=pytest.mark.long),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive("24 settings of every kind; CI runs one"))
            for name in GEMMA_FAMILIES
            if name != "gemma-4-e4b"
        ),
    ],
)
def test_greedy_tokens_in_every_setting(saved: Callable[[str], Saved], name: str) -> None:
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    for setting in greedy_answers.SETTINGS:
        greedy_answers.check(saved(name).path, setting, expected, model_impl="pagoda")


@pytest.mark.parametrize("name", few("gemma-4-31b", "gemma-4-e4b"))
def test_a_conversation_of_many_windows_resumes_at_its_prefix(saved: Callable[[str], Saved], name: str) -> None:
    model, rng = saved(name).model, random.Random(7)
    llm = make_llm(saved(name).path, block_size=4, max_num_batched_tokens=30)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    prompt = random_tokens(rng, 70)
    for turn in range(2):
        ids = torch.tensor([prompt])
        with eos_ids(model, []):
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
        output = run(llm, [prompt], params)
        assert answers(output) == [[expected[0, len(prompt) :].tolist()]]
        assert output[0].num_cached_tokens >= 76 * turn
        prompt = [*expected[0].tolist(), *random_tokens(rng, 20)]


@pytest.mark.parametrize("name", few("gemma-4-e4b"))
def test_rejected_drafts_leave_no_trace(
    saved: Callable[[str], Saved], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts that repeat themselves, in steps of 40 tokens."""
    drafts, model = DraftCounter(monkeypatch), saved(name).model
    prompts = [[7, 8, 9, 10] * 6, [5] * 24, list(range(40, 52)) * 2, random_tokens(random.Random(2), 24)]
    ids = torch.tensor(prompts)
    with eos_ids(model, []):
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    llm = make_llm(saved(name).path, block_size=4, max_num_batched_tokens=40, speculative_config=SPECULATION)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert answers(run(llm, prompts, params)) == [[row[24:].tolist()] for row in expected]
    assert drafts.num_accepted < drafts.num_drafted


@pytest.mark.parametrize("name", few("gemma-4-31b", "gemma-4-e4b"))
def test_beams_equal_transformers(saved: Callable[[str], Saved], name: str) -> None:
    llm = make_llm(saved(name).path, block_size=4, max_num_batched_tokens=16)
    activity = Activity(llm)
    params = SamplingParams(beam_width=3, n=3, temperature=0.0, max_tokens=greedy_answers.MAX_TOKENS, ignore_eos=True)
    prompts = greedy_answers.make_prompts()[:2]
    expected = [oracle_beams(saved(name).model, prompt, params, [])[0] for prompt in prompts]
    assert answers(run(llm, prompts, params)) == expected
    assert activity.num_copies > 0


@pytest.mark.parametrize("name", few("gemma-4-31b", "gemma-4-26b-a4b", "gemma-4-e4b"))
def test_two_ranks_share_a_model(saved: Callable[[str], Saved], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)
    llm = make_llm(saved(name).path, tensor_parallel_size=2, block_size=4, max_num_batched_tokens=16, num_blocks=64)
    params = SamplingParams(temperature=0.0, max_tokens=greedy_answers.MAX_TOKENS, ignore_eos=True)
    prompts = greedy_answers.make_prompts()
    assert answers(run(llm, prompts, params)) == greedy_answers.oracle(saved(name).model, prompts)
    llm.engine.close()


def test_ranks_that_do_not_divide_a_model_are_refused(saved: Callable[[str], Saved]) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 does not divide the model's 4 attention heads"):
        make_llm(saved("gemma-4-31b").path, tensor_parallel_size=3)
