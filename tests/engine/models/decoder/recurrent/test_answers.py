"""Engines on tiny models with recurrent layers: tokens and beams equal those of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from engine.errors import ConfigError, ModelLoadError
from engine.sampling_params import SamplingParams
from tests.engine.models.adapter import greedy_answers
from tests.engine.models.decoder.family_answers import check_beams, check_drafts, check_two_ranks
from tests.engine.models.decoder.recurrent.recurrent_families import few, sweep
from tests.engine.models.decoder.saved_models import Saved
from tests.engine.oracle import answers, eos_ids, make_llm, random_tokens, run

POOL_TOKENS = 44  # a request and a half: the second is preempted


@pytest.mark.parametrize(
    "name",
    few("qwen3-next", "qwen3.5-moe", "lfm2", "granite-4-h", "mamba2", "nemotron-3-nano", "falcon-h1", "kimi-linear"),
)
def test_greedy_tokens_equal_transformers(saved: Callable[[str], Saved], name: str) -> None:
    """With blocks of 4 tokens, steps of 7, shared prefixes, a cached prompt, and preemption."""
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    assert len({tuple(answer) for (answer,) in expected}) > 1, "the oracle's answers are too much alike"
    pool_tokens = POOL_TOKENS if name != "granite-4" else greedy_answers.POOL_TOKENS  # which has no states
    for swap_space_gib in (0.0, 0.02):
        activity = greedy_answers.check(
            saved(name).path, (4, 7, True, swap_space_gib), expected, model_impl="pagoda", pool_tokens=pool_tokens
        )
        if swap_space_gib:
            activity.check_swapped()
        else:
            assert activity.num_recomputed


@pytest.mark.parametrize("name", sweep("qwen3.5", "nemotron-3-nano"))
def test_greedy_tokens_in_every_setting(saved: Callable[[str], Saved], name: str) -> None:
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    for setting in greedy_answers.SETTINGS:
        greedy_answers.check(saved(name).path, setting, expected, model_impl="pagoda")


def test_the_first_prompt_that_parts_resumes_within_the_other(
    saved: Callable[[str], Saved], caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(8)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    first = random_tokens(rng, 70)
    parted = [*first[:60], *random_tokens(rng, 5)]
    expected = answers(run(make_llm(saved("lfm2").path), [parted], params))
    with caplog.at_level("INFO"):
        llm = make_llm(saved("lfm2").path, block_size=8, num_blocks=80, state_snapshot_interval=10)
    assert "a snapshot every 16 tokens of a prefill" in caplog.text
    run(llm, [first], params)
    output = run(llm, [parted], params)
    assert output[0].num_cached_tokens == 48
    assert answers(output) == expected


@pytest.mark.parametrize("name", few("lfm2", "qwen3.5", "mamba2", long=("kimi-linear", "falcon-h1")))
def test_a_long_conversation_resumes_at_snapshots(saved: Callable[[str], Saved], name: str) -> None:
    """Prompts of several of transformers' chunks: the second follows an answer, the third leaves the first early."""
    model, path = saved(name).model, saved(name).path
    rng = random.Random(7)
    llm = make_llm(path, block_size=4, max_num_batched_tokens=50)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    prompt, cached = random_tokens(rng, 150), []
    for turn in ("new", "next", "other"):
        ids = torch.tensor([prompt])
        with eos_ids(model, []):
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
        output = run(llm, [prompt], params)
        assert answers(output) == [[expected[0, len(prompt) :].tolist()]], turn
        cached.append(output[0].num_cached_tokens)
        if turn == "new":
            first, prompt = prompt, [*expected[0].tolist(), *random_tokens(rng, 40)]
        else:
            prompt = first[:90] + random_tokens(rng, 30)
    assert cached[0] == 0
    assert cached[1] >= 148  # the answer's end or the prompt's
    assert cached[2] % 4 == 0


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "nemotron-h"])
def test_rejected_drafts_leave_no_trace_in_states(
    saved: Callable[[str], Saved], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = check_drafts(saved(name), monkeypatch)
    assert drafts.num_accepted < drafts.num_drafted


@pytest.mark.parametrize(
    "name", few("lfm2-moe", "qwen3-next", "qwen3.5", "kimi-linear", "falcon-h1-norm", "nemotron-3-super")
)
def test_two_ranks_share_a_model(saved: Callable[[str], Saved], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in ("granite-4-h-moe", "olmo-hybrid"):
        pytest.skip("one group of heads is not divided, nor are norms over all heads")
    check_two_ranks(saved(name), monkeypatch)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("granite-4-h-moe", 2, "divide the model's 1 groups of heads of Mamba layers; choose one of 1"),
        ("qwen3.5", 3, "divide the model's 4 attention heads; choose"),
        ("kimi-linear", 3, "divide the model's 4 attention heads; choose"),
        ("mamba2", 3, "divide the model's 8 heads of Mamba layers"),
        ("lfm2", 8, "divide the model's 4 attention heads"),
    ],
)
def test_ranks_that_do_not_divide_a_model_are_refused(
    saved: Callable[[str], Saved], name: str, size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={size} does not {message}"):
        make_llm(saved(name).path, tensor_parallel_size=size)


def test_ranks_do_not_share_norms_over_all_heads(saved: Callable[[str], Saved]) -> None:
    with pytest.raises(ModelLoadError, match="whose norms of queries and keys are over all heads; set it to 1"):
        make_llm(saved("olmo-hybrid").path, tensor_parallel_size=2)


@pytest.mark.parametrize("name", few("qwen3.5", "falcon-h1", long=("lfm2-moe", "kimi-linear", "nemotron-3-nano")))
def test_beams_equal_transformers(saved: Callable[[str], Saved], name: str) -> None:
    check_beams(saved(name))
