"""Engines on tiny models of Llama 4's kinds: tokens and beams equal those of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from engine.sampling_params import SamplingParams
from tests.engine.models.adapter import greedy_answers
from tests.engine.models.decoder.llama4.conftest import Saved
from tests.engine.models.decoder.llama4.llama4_models import LLAMA4_MODELS
from tests.engine.models.test_speculative_generation import SPECULATION, DraftCounter
from tests.engine.oracle import Activity, answers, eos_ids, make_llm, oracle_beams, random_tokens, run
from tests.engine.worker.test_tensor_parallel import ThreadRanks

SCOUT, MAVERICK, OTHER = LLAMA4_MODELS


@pytest.mark.parametrize("name", LLAMA4_MODELS)
def test_greedy_tokens_equal_transformers(saved: Callable[[str], Saved], name: str) -> None:
    """With blocks of 4 tokens, steps of 7, shared prefixes, a cached prompt, and preemption."""
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    assert len({tuple(answer) for (answer,) in expected}) > 1, "the oracle's answers are too much alike"
    for swap_space_gib in (0.0, 0.001):
        setting = (4, 7, True, swap_space_gib)
        activity = greedy_answers.check(saved(name).path, setting, expected, model_impl="pagoda")
        assert activity.num_swapped_out if swap_space_gib else activity.num_recomputed


@pytest.mark.long
@pytest.mark.parametrize("name", LLAMA4_MODELS)
def test_greedy_tokens_in_every_setting(saved: Callable[[str], Saved], name: str) -> None:
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    for setting in greedy_answers.SETTINGS:
        greedy_answers.check(saved(name).path, setting, expected, model_impl="pagoda")


@pytest.mark.parametrize("name", [SCOUT, OTHER])
def test_a_conversation_of_many_chunks_resumes_at_its_prefix(saved: Callable[[str], Saved], name: str) -> None:
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


def test_rejected_drafts_leave_no_trace(saved: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts that repeat themselves, in steps of 40 tokens; drafts cross the borders of chunks."""
    drafts, model = DraftCounter(monkeypatch), saved(SCOUT).model
    prompts = [[7, 8, 9, 10] * 6, [5] * 24, list(range(40, 52)) * 2, random_tokens(random.Random(2), 24)]
    ids = torch.tensor(prompts)
    with eos_ids(model, []):
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    llm = make_llm(saved(SCOUT).path, block_size=4, max_num_batched_tokens=40, speculative_config=SPECULATION)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert answers(run(llm, prompts, params)) == [[row[24:].tolist()] for row in expected]
    assert drafts.num_accepted < drafts.num_drafted


@pytest.mark.parametrize("name", [SCOUT, OTHER])
def test_beams_equal_transformers(saved: Callable[[str], Saved], name: str) -> None:
    llm = make_llm(saved(name).path, block_size=4, max_num_batched_tokens=16)
    activity = Activity(llm)
    params = SamplingParams(beam_width=3, n=3, temperature=0.0, max_tokens=greedy_answers.MAX_TOKENS, ignore_eos=True)
    prompts = greedy_answers.make_prompts()[:2]
    expected = [oracle_beams(saved(name).model, prompt, params, [])[0] for prompt in prompts]
    assert answers(run(llm, prompts, params)) == expected
    assert activity.num_copies > 0


@pytest.mark.parametrize("name", [SCOUT, MAVERICK])
def test_two_ranks_share_a_model(saved: Callable[[str], Saved], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)
    llm = make_llm(saved(name).path, tensor_parallel_size=2, block_size=4, max_num_batched_tokens=16, num_blocks=64)
    params = SamplingParams(temperature=0.0, max_tokens=greedy_answers.MAX_TOKENS, ignore_eos=True)
    prompts = greedy_answers.make_prompts()
    assert answers(run(llm, prompts, params)) == greedy_answers.oracle(saved(name).model, prompts)
    llm.engine.close()
