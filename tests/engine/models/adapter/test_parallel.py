"""Tensor-parallel ranks of transformers' modules compute what one rank computes; here the ranks are threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.kv.layer_cache import KeyValue
from engine.llm import LLM
from engine.models.adapter.decoder import TransformersDecoder
from engine.models.adapter.parallel import ParallelPlan
from engine.models.config.families.architectures import TENSOR_PARALLEL
from engine.models.tensor_parallel import TensorParallel
from tests.engine.models.adapter.conftest import Zoo, settle
from tests.engine.models.adapter.tiny_models import VOCAB_SIZE, build_model
from tests.engine.worker.parallel_answers import OPTIONS, answer, check_equal, make_prompts
from tests.engine.worker.test_tensor_parallel import rank_threads

__all__ = ["rank_threads"]

LONGEST = 100  # tokens of a prompt: the tiny models have 128 positions
# A norm of each head, a norm of all heads with experts, a plan of ours with sinks, an old layout with fused heads.
IN_MAKE_TEST = ("Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM", "GptOssForCausalLM")
SAME_PLANS = {  # another architecture that CI runs is divided by the same plan
    "ArceeForCausalLM",
    "Cohere2MoeForCausalLM",
    "CwmForCausalLM",
    "Dots1ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM",
    "FlexOlmoForCausalLM",
    "GemmaForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "HeliumForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "HyperCLOVAXForCausalLM",
    "Jais2ForCausalLM",
    "MellumForCausalLM",
    "Ministral3ForCausalLM",
    "MinistralForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "OlmoForCausalLM",
    "OlmoeForCausalLM",
    "PhimoeForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SmolLM3ForCausalLM",
    "VaultGemmaForCausalLM",
}


def _mark(architecture: str) -> tuple[pytest.MarkDecorator, ...]:
    if architecture in IN_MAKE_TEST:
        return ()
    return (pytest.mark.exhaustive("CI runs its plan") if architecture in SAME_PLANS else pytest.mark.long,)


EXPERTS_ONLY = (  # whose plans do not divide the heads
    "AfmoeForCausalLM",
    "FlintForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "PhimoeForCausalLM",
)


def parallel_llm(path: str, size: int) -> LLM:
    return LLM(path, model_impl="transformers", tensor_parallel_size=size, **OPTIONS)


def local_model(llm: LLM) -> Any:
    return llm.engine.runner.workers.local.shard.model  # type: ignore[attr-defined]


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=_mark(name)) for name in sorted(TENSOR_PARALLEL)],
)
def test_two_ranks_answer_like_one(architecture: str, zoo: Zoo) -> None:
    path, prompts = zoo(architecture).path, make_prompts(VOCAB_SIZE, LONGEST)
    alone, together = parallel_llm(path, 1), parallel_llm(path, 2)
    try:
        check_equal(answer(together, prompts), answer(alone, prompts))
        whole, half = local_model(alone), local_model(together)
        assert isinstance(half, TransformersDecoder)
        assert half.num_bytes < 0.93 * whole.num_bytes  # embedding and head are large in tiny models
        is_divided = 2 * half.attention.num_heads == whole.attention.num_heads
        assert is_divided == (architecture not in EXPERTS_ONLY)
    finally:
        together.engine.close()
        alone.engine.close()


@pytest.mark.long
@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("Glm4MoeForCausalLM", {"moe_intermediate_size": 32}),  # torch's grouped product takes multiples of 16 bytes
        ("OlmoeForCausalLM", {"intermediate_size": 32}),
        ("Starcoder2ForCausalLM", {}),
    ],
)
def test_four_ranks_that_replicate_two_kv_heads_answer_like_one(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path, prompts = settle(architecture, tmp_path, **options).path, make_prompts(VOCAB_SIZE, LONGEST)
    alone, together = parallel_llm(path, 1), parallel_llm(path, 4)
    try:
        check_equal(answer(together, prompts), answer(alone, prompts))
        model = local_model(together)
        assert model.attention.num_heads == 1
        assert {cache.heads for cache in model.layer_caches if isinstance(cache, KeyValue)} == {1}
    finally:
        together.engine.close()
        alone.engine.close()


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize("architecture", ["Olmo2ForCausalLM", pytest.param("Olmo3ForCausalLM", marks=pytest.mark.long)])
def test_ranks_compute_with_transformers_modules_what_our_own_decoder_does_not_divide(
    architecture: str, zoo: Zoo
) -> None:
    path, prompts = zoo(architecture).path, make_prompts(VOCAB_SIZE, LONGEST)
    alone, together = LLM(path, **OPTIONS), LLM(path, tensor_parallel_size=2, **OPTIONS)
    try:
        assert isinstance(local_model(together), TransformersDecoder)
        assert not isinstance(local_model(alone), TransformersDecoder)
        check_equal(answer(together, prompts), answer(alone, prompts))
    finally:
        together.engine.close()
        alone.engine.close()


@pytest.mark.parametrize(
    ("architecture", "problem"),
    [
        ("GPT2LMHeadModel", "transformers has no plan for it"),
        ("GlmForCausalLM", "its plan for 'model.layers.*.mlp.gate_up_proj' is 'colwise_gather_output'"),
    ],
)
def test_a_model_without_a_plan_that_is_understood_is_refused(architecture: str, problem: str) -> None:
    """Also if it were in the table of those that were compared."""
    with pytest.raises(ConfigError, match=f"tensor_parallel_size=2 is not supported for '{architecture}': ") as error:
        ParallelPlan(build_model(architecture), TensorParallel(0, 2, object()))
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("options", "size", "problem"),
    [
        ({}, 3, "4 attention heads"),
        ({"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3}, 4, "3 KV heads"),
        ({"intermediate_size": 41}, 2, "41 features of 'model.layers.0.mlp.gate_proj.weight'"),
    ],
)
def test_a_size_that_does_not_divide_the_model_is_refused(options: dict[str, Any], size: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={size} does not divide the model's {problem}; choose"):
        ParallelPlan(build_model("LlamaForCausalLM", **options), TensorParallel(0, size, object()))
