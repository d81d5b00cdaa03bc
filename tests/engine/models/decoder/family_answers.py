"""What engines of every family are compared with transformers in, beside ``greedy_answers``."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.sampling_params import SamplingParams
from tests.engine.models.adapter import greedy_answers
from tests.engine.models.decoder.saved_models import Saved
from tests.engine.models.test_speculative_generation import SPECULATION, DraftCounter
from tests.engine.oracle import Activity, answers, eos_ids, make_llm, oracle_beams, random_tokens, run
from tests.engine.worker.test_tensor_parallel import ThreadRanks


def generated(saved: Saved, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Return transformers' greedy answers to prompts of one length, which no end token ends."""
    ids = torch.tensor(prompts)
    options: dict[str, Any] = {"max_new_tokens": max_tokens, "do_sample": False}
    with eos_ids(saved.model, []):
        rows = saved.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return [row[len(prompts[0]) :].tolist() for row in rows]


def check_beams(saved: Any, **options: Any) -> None:
    """Compare beams, whose forks copy the block that they share in part."""
    llm = make_llm(saved.path, block_size=4, max_num_batched_tokens=16, **options)
    activity = Activity(llm)
    params = SamplingParams(beam_width=3, n=3, temperature=0.0, max_tokens=greedy_answers.MAX_TOKENS, ignore_eos=True)
    prompts = greedy_answers.make_prompts()[:2]
    expected = [oracle_beams(saved.model, prompt, params, [])[0] for prompt in prompts]
    assert answers(run(llm, prompts, params)) == expected
    assert activity.num_copies > 0


def check_two_ranks(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the answers of two ranks, which are threads."""
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)
    llm = make_llm(saved.path, tensor_parallel_size=2, block_size=4, max_num_batched_tokens=16, num_blocks=64)
    params = SamplingParams(temperature=0.0, max_tokens=greedy_answers.MAX_TOKENS, ignore_eos=True)
    prompts = greedy_answers.make_prompts()
    assert answers(run(llm, prompts, params)) == greedy_answers.oracle(saved.model, prompts)
    llm.engine.close()


def check_drafts(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> DraftCounter:
    """Compare answers with drafts to prompts that repeat themselves, in steps of 40 tokens; return what was drafted."""
    drafts = DraftCounter(monkeypatch)
    prompts = [[7, 8, 9, 10] * 6, [5] * 24, list(range(40, 52)) * 2, random_tokens(random.Random(2), 24)]
    expected = generated(saved, prompts, 12)
    llm = make_llm(saved.path, block_size=4, max_num_batched_tokens=40, speculative_config=SPECULATION)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert answers(run(llm, prompts, params)) == [[answer] for answer in expected]
    return drafts


def check_conversation(saved: Saved) -> None:
    """Compare the answers of two turns, of which the second is longer than several windows and resumes at the first."""
    rng = random.Random(7)
    llm = make_llm(saved.path, block_size=4, max_num_batched_tokens=30)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    prompt = random_tokens(rng, 70)
    for turn in range(2):
        expected = generated(saved, [prompt], 9)
        output = run(llm, [prompt], params)
        assert answers(output) == [expected]
        assert output[0].num_cached_tokens >= 76 * turn
        prompt = [*prompt, *expected[0], *random_tokens(rng, 20)]
