"""Greedy tokens equal transformers' generate, whatever the engine's blocks, budgets, pool and swap space."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.scheduling.preemption import Preemption
from engine.scheduling.step_builder import StepBuilder
from engine.sequence import SequenceGroup, SequenceStatus
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.conftest import SavedModel, families

NUM_PROMPTS = 64
MAX_TOKENS = 12
POOL_TOKENS = 640  # hardly more than the longest request takes, so that sequences are preempted
Setting = tuple[bool, int, int, float]  # prefix caching, token budget, block size, swap space in GiB
SETTINGS: list[Setting] = [
    (caching, budget, block_size, 0.002 if caching == (budget == 16) else 0.0)
    for caching, budget, block_size in product((True, False), (16, 2048), (1, 4, 16, 256))
]
# CI computes two settings of each family, which together have each value; `make test-all` computes all others.
FEW_SETTINGS: dict[str, list[Setting]] = {
    "llama": [(True, 16, 4, 0.002), (False, 2048, 256, 0.002)],
    "qwen2": [(True, 2048, 16, 0.0), (False, 16, 1, 0.0)],
    "mistral": [(True, 16, 4, 0.002), (False, 2048, 256, 0.002)],
    "qwen3": [(True, 2048, 16, 0.0), (False, 16, 1, 0.0)],
}
DEMO_SETTINGS: list[Setting] = [
    (True, 16, 4, 0.0),
    (True, 2048, 16, 0.05),
    (False, 2048, 256, 0.0),
    (False, 16, 1, 0.05),
]
DEMO_MODEL = Path(__file__).parents[3] / "demo" / "model"


def make_prompts(vocab_size: int) -> list[list[int]]:
    """Prompts of 1 to 600 tokens; half of them begin with one of two shared prefixes, and two are identical."""
    rng = random.Random(7)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(count)]

    shared = [tokens(256), tokens(300)]
    lengths = [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 243, 246, 249, 255, 256, 257, 599, 600]
    lengths += [rng.randint(1, 600) for _ in range(NUM_PROMPTS // 2 - len(lengths))]
    prompts = [tokens(length) for length in lengths]
    prompts += [shared[i % 2] + tokens(rng.randint(0, 300)) for i in range(NUM_PROMPTS // 2 - 1)]
    prompts.append(list(prompts[-1]))
    return prompts


def max_tokens_for(prompt: list[int]) -> int:
    """Long answers for the short prompts, which together outgrow the pool, and for those that nearly fill a block of
    256, so that several grow past it at once."""
    return 96 if len(prompt) < 10 else 32 if 240 <= len(prompt) <= 260 else MAX_TOKENS


def oracle(model: PreTrainedModel, prompts: list[list[int]], guesses: list[list[int]] | None = None) -> list[list[int]]:
    """Return transformers' own greedy tokens, prompt by prompt (padding a batch would change its numerics).

    A right guess saves generating: one forward pass finds each of its tokens the most likely one after those before.
    """
    answers = []
    for index, prompt in enumerate(prompts):
        if guesses is not None and _is_greedy_answer(model, prompt, guesses[index]):
            answers.append(guesses[index])
            continue
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens_for(prompt), do_sample=False
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def _is_greedy_answer(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> bool:
    """Whether each token of ``answer`` is the most likely one, and it ends where it must."""
    eos = model.generation_config.eos_token_id
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    ends = [index for index, token_id in enumerate(answer, start=1) if token_id in eos_ids] + [max_tokens_for(prompt)]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return len(answer) == min(ends) and logits.argmax(dim=-1).tolist() == answer


def generate(
    path: str, prompts: list[list[int]], *, ignore_eos: bool = False, **options: Any
) -> tuple[list[list[int]], LLM, int]:
    """Return our greedy tokens, the engine for inspection, and the number of prompt tokens that the cache served."""
    # Unpaced: else a measurement would decide how many prefill tokens a step has, and so which sequence is preempted.
    llm = LLM(path, dtype="float32", device="cpu", skip_tokenizer_init=True, max_decode_slowdown=None, **options)
    params = [
        SamplingParams(temperature=0.0, max_tokens=max_tokens_for(prompt), ignore_eos=ignore_eos) for prompt in prompts
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], llm, sum(o.num_cached_tokens for o in outputs)


class PreemptionCounter:
    """Counts the preemptions of every engine that is created after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = self.num_swaps = 0
        original = Preemption.preempt_last

        def counting(preemption: Preemption, step: StepBuilder) -> SequenceGroup:
            group = original(preemption, step)
            self.count += 1
            self.num_swaps += group.status is SequenceStatus.SWAPPED
            return group

        monkeypatch.setattr(Preemption, "preempt_last", counting)


def check_against_oracle(
    model: PreTrainedModel,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],
    settings: list[Setting],
    *,
    ignore_eos: bool = False,
) -> None:
    expected: list[list[int]] = []
    preemptions = PreemptionCounter(monkeypatch)
    for caching, budget, block_size, swap_space_gib in settings:
        before, swaps_before = preemptions.count, preemptions.num_swaps
        got, llm, cached_tokens = generate(
            path,
            prompts,
            ignore_eos=ignore_eos,
            enable_prefix_caching=caching,
            max_num_batched_tokens=budget,
            block_size=block_size,
            num_blocks=-(-POOL_TOKENS // block_size),
            swap_space_gib=swap_space_gib,
        )
        name = f"caching={caching} budget={budget} block_size={block_size} swap_space_gib={swap_space_gib}"
        expected = expected or oracle(model, prompts, guesses=got)
        preempted = preemptions.count - before
        print(f"{name}: {preempted} preemptions, {cached_tokens} prompt tokens from the cache")
        assert got == expected, name
        assert preempted > 0, f"{name}: the pool was never full, so preemption was not tested"
        assert preemptions.num_swaps - swaps_before == (preempted if swap_space_gib else 0), name
        assert (cached_tokens > 0) == caching, name
        llm.engine.block_manager.check_integrity([])
        assert llm.engine.meter.stats().num_used_blocks == 0, name
    assert len({tuple(answer) for answer in expected}) > len(prompts) // 2, "the oracle's answers are too much alike"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", families("mistral"), indirect=True)
def test_greedy_equals_transformers_for_every_family(family: SavedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    check_against_oracle(family.model, family.path, monkeypatch, make_prompts(384), FEW_SETTINGS[family.name])


@pytest.mark.exhaustive("every combination of settings, of which CI runs two with each family")
@pytest.mark.timeout(600)
def test_greedy_equals_transformers_in_every_other_setting(family: SavedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [setting for setting in SETTINGS if setting not in FEW_SETTINGS[family.name]]
    assert len(others) == len(SETTINGS) - 2
    check_against_oracle(family.model, family.path, monkeypatch, make_prompts(384), others)


@pytest.mark.exhaustive("four settings of a larger model; CI runs two with each tiny family")
@pytest.mark.timeout(600)
def test_greedy_equals_transformers_for_the_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    # It would end its answers to random tokens too early for the pool to run short.
    model.generation_config.update(do_sample=False, temperature=None, top_p=None, top_k=None, eos_token_id=None)
    prompts = make_prompts(model.config.vocab_size)[::2]  # of every length, with and without the shared prefixes
    check_against_oracle(model, str(DEMO_MODEL), monkeypatch, prompts, DEMO_SETTINGS, ignore_eos=True)


def test_the_oracle_takes_a_guess_only_if_transformers_generates_it(qwen3: SavedModel) -> None:
    prompts = make_prompts(384)[9:11]
    generated = oracle(qwen3.model, prompts)
    assert oracle(qwen3.model, prompts, guesses=generated) == generated
    first, other = generated
    for wrong in (other, first[:-1], [*first, 5], [*first[:-1], first[-1] ^ 1], [first[0] ^ 1, *first[1:]], []):
        assert oracle(qwen3.model, prompts, guesses=[wrong, other]) == generated


def test_sharded_checkpoint_is_loaded_whole(tmp_path: Path, qwen3: SavedModel) -> None:
    path = save_checkpoint(qwen3.model, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    prompts = make_prompts(384)[:8]
    got, _, _ = generate(path, prompts)
    assert got == oracle(qwen3.model, prompts, guesses=got)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_rope_scaling_equals_transformers(tmp_path: Path, scaling: dict[str, Any]) -> None:
    model = build_model("llama", rope_parameters=scaling)
    prompts = make_prompts(384)[:10]
    got, _, _ = generate(save_checkpoint(model, tmp_path), prompts)
    assert got == oracle(model, prompts, guesses=got)


def test_every_eos_id_of_generation_config_ends_the_answer(tmp_path: Path, qwen3: SavedModel) -> None:
    prompts = make_prompts(384)[:16]
    free = [answer for answer in oracle(qwen3.model, prompts) if len(answer) >= MAX_TOKENS]
    eos_ids = [free[0][3], free[1][5]]
    model = build_model("qwen3")
    model.generation_config.eos_token_id = eos_ids
    path = save_checkpoint(model, tmp_path)
    got, llm, _ = generate(path, prompts)
    assert llm.engine.info.eos_token_ids == tuple(eos_ids)
    assert got == oracle(model, prompts, guesses=got)
    assert {answer[-1] for answer in got if len(answer) < MAX_TOKENS} == set(eos_ids)


def test_bfloat16_logits_stay_near_float32(qwen3: SavedModel) -> None:
    """Tokens may differ in bf16, so compare what they come from."""
    prompts = make_prompts(384)[:6]
    exact = generate(qwen3.path, prompts)[1]
    coarse = LLM(qwen3.path, dtype="bfloat16", device="cpu", skip_tokenizer_init=True)
    logits = []
    for llm in (exact, coarse):
        captured: list[torch.Tensor] = []
        model: Any = llm.engine.runner.workers.local.shard.model  # type: ignore[attr-defined]
        original = model.compute_logits
        model.compute_logits = lambda *a, f=original, c=captured: c.append(f(*a)) or c[-1]
        llm.engine.block_manager.prefix_cache.reset()
        for prompt in prompts:
            llm.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        logits.append(torch.cat(captured))
    error = (logits[0] - logits[1]).norm() / logits[0].norm()
    print(f"relative error of bf16 logits: {error:.4f}")
    assert error < 0.05
