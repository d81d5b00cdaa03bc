"""Greedy tokens and beams of models with experts equal transformers' generate, whatever the engine does meanwhile."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest
import torch

from engine.sampling_params import SamplingParams
from tests.engine.checkpoints import EXPERT_FAMILIES, build_model, save_checkpoint
from tests.engine.conftest import SavedModel
from tests.engine.models.test_generation import FEW_SETTINGS, check_against_oracle, make_prompts
from tests.engine.models.ties import require_no_ties
from tests.engine.oracle import Activity, answers, make_llm, oracle_beams, random_tokens, run

MAX_TOKENS = 6
# block_size, token budget, prefix caching, swap space in GiB
SETTINGS = [
    (block_size, budget, caching, 0.001 if caching == (budget == 7) else 0.0)
    for block_size, budget, caching in product((1, 4), (7, 256), (True, False))
]
POOL_TOKENS = 44  # two prompts, whose answers do not fit: requests are preempted


def few_prompts() -> list[list[int]]:
    """Prompts of one length, two of which begin alike and two are the same."""
    rng = random.Random(3)
    prompts = [random_tokens(rng, 20) for _ in range(3)]
    prompts[1][:13] = prompts[0][:13]
    return [*prompts, list(prompts[-1])]


def oracle(family: SavedModel, prompts: list[list[int]]) -> list[list[list[int]]]:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, beam_width=1)
    beams = [oracle_beams(family.model, prompt, params, [])[0] for prompt in prompts]
    whole = [torch.tensor(prompt + tokens[:-1]) for prompt, (tokens,) in zip(prompts, beams, strict=True)]
    require_no_ties(family.model, whole, first=len(prompts[0]) - 1)
    return beams


@pytest.mark.usefixtures("implementation")
def test_greedy_tokens_equal_transformers_in_every_setting(sparse_family: SavedModel) -> None:
    prompts = few_prompts()
    expected = oracle(sparse_family, prompts)
    assert len({tuple(answer) for (answer,) in expected}) == 3, "the oracle's answers are too much alike"
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    num_preempted = {0.0: 0, 0.001: 0}
    for block_size, budget, caching, swap_space_gib in SETTINGS:
        llm = make_llm(
            sparse_family.path,
            block_size=block_size,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            swap_space_gib=swap_space_gib,
            num_blocks=POOL_TOKENS // block_size,
        )
        activity = Activity(llm)
        assert answers(run(llm, prompts, params)) == expected
        again = run(llm, prompts[-1:], params)
        assert answers(again) == expected[-1:]
        assert (again[0].num_cached_tokens > 0) == caching
        num_preempted[swap_space_gib] += activity.num_swapped_out if swap_space_gib else activity.num_recomputed
    assert all(num_preempted.values())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "sparse_family",
    [
        pytest.param(name, marks=pytest.mark.long if name == "qwen3_moe" else pytest.mark.exhaustive("further experts"))
        for name in sorted(EXPERT_FAMILIES)
    ],
    indirect=True,
)
def test_long_greedy_answers_equal_transformers(sparse_family: SavedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    check_against_oracle(
        sparse_family.model, sparse_family.path, monkeypatch, make_prompts(384), FEW_SETTINGS["mistral"]
    )


@pytest.mark.usefixtures("implementation")
def test_beams_equal_transformers(sparse_family: SavedModel) -> None:
    llm = make_llm(sparse_family.path, block_size=4, max_num_batched_tokens=16)
    activity = Activity(llm)
    params = SamplingParams(beam_width=3, n=3, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompts = few_prompts()[:2]
    expected = [oracle_beams(sparse_family.model, prompt, params, [])[0] for prompt in prompts]
    assert answers(run(llm, prompts, params)) == expected
    assert activity.num_copies > 0


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 1}),
        ("qwen3_moe", {"num_experts_per_tok": 8, "norm_topk_prob": False}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "attention_bias": True}),
        ("mixtral", {"intermediate_size": 36, "num_local_experts": 1, "num_experts_per_tok": 1}),
    ],
)
def test_variants_equal_transformers(family: str, changes: dict[str, object], tmp_path: Path) -> None:
    model = build_model(family, **changes)
    saved = SavedModel(family, model, save_checkpoint(model, tmp_path))
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    assert answers(run(make_llm(saved.path), few_prompts(), params)) == oracle(saved, few_prompts())


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_bfloat16_logits_stay_near_float32(family: str, tmp_path: Path) -> None:
    """All experts compute every token here, or the last bits could choose other experts."""
    all_experts = {"num_experts_per_tok": 8 if family == "qwen3_moe" else 4}
    path = save_checkpoint(build_model(family, **all_experts), tmp_path)
    prompts = few_prompts()[:1]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)
    rows = []
    for dtype in ("float32", "bfloat16"):
        (output,) = run(make_llm(path, dtype=dtype), prompts, params)
        assert output.prompt_logprobs is not None
        prompt_ids = prompts[0][1:]
        positions = zip(prompt_ids, output.prompt_logprobs[1:], strict=True)
        rows.append(
            torch.tensor([position[token_id].logprob for token_id, position in positions if position is not None])
        )
    error = (rows[0] - rows[1]).norm() / rows[0].norm()
    assert 0 < error < 0.05
