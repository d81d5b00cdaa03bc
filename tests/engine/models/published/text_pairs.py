"""TEXT_PAIRS: published quantised checkpoints of models of text, each with a tiny model of its family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.models.adapter import tiny_models
from tests.engine.models.decoder.latent.latent_families import build_latent_model
from tests.engine.models.decoder.recurrent.recurrent_families import build_recurrent_model, save_as_published

__all__ = ["TEXT_PAIRS", "Pair"]

KV_SCALES = ("k_proj.k_scale", "v_proj.v_scale")
VOCABULARY: dict[str, Any] = {"vocab_size": 120}


@dataclass(frozen=True)
class Pair:
    """A published checkpoint.

    Attributes:
        build: makes the tiny model.
        form: of its weights, a key of FORMS.
        skipped: parts of the names of weights that stay as they are, besides norms, routers, embeddings and the head.
        further: parts of the names of weights that are quantised although others leave them, such as the head.
        mtp: the prefix of a layer that predicts further tokens, which is quantised and not read.
        extra: further tensors.
        save: writes the model as it is published.
    """

    build: Callable[[], PreTrainedModel]
    form: str
    skipped: tuple[str, ...] = ()
    further: tuple[str, ...] = ()
    mtp: str = ""
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    save: Callable[[PreTrainedModel, Path], object] = save_checkpoint


def dense(architecture: str, **options: Any) -> Callable[[], PreTrainedModel]:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64}
    return lambda: tiny_models.build_model(architecture, **VOCABULARY | sizes | options)


def qwen3_moe() -> PreTrainedModel:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    return build_model("qwen3_moe", **VOCABULARY | sizes)


def latent(name: str, **options: Any) -> Callable[[], PreTrainedModel]:
    sizes = {"moe_intermediate_size": 64, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 32}
    return lambda: build_latent_model(name, **VOCABULARY | sizes | options)


def recurrent(name: str, **options: Any) -> Callable[[], PreTrainedModel]:
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    return lambda: build_recurrent_model(name, **VOCABULARY | sizes | options)


def frequencies(layers: int) -> dict[str, torch.Tensor]:
    """Return the buffers of RoPE that older checkpoints store."""
    return {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(layers)}


def kv_scales(layers: int, parent: str = "model.layers.{}.self_attn.") -> dict[str, torch.Tensor]:
    """Return the scales of an FP8 cache of keys and values as compressed-tensors has them."""
    names = (f"{parent.format(layer)}{kind}_scale" for layer in range(layers) for kind in "kv")
    return {name: torch.full((1,), 0.5) for name in names}


V3 = latent("deepseek-v3", num_nextn_predict_layers=1)
GLM_AIR = dense("Glm4MoeForCausalLM", num_nextn_predict_layers=1)
QWEN3_NEXT = recurrent("qwen3-next", num_experts=5)
ATTENTION, SHARED = "self_attn.", "shared_expert"
TEXT_PAIRS: dict[str, Pair] = {
    # Dense models
    "Llama-3.3-70B-Instruct-FP8 (nvidia)": Pair(dense("LlamaForCausalLM"), "fp8 modelopt"),
    "Llama-3.3-70B-Instruct-NVFP4": Pair(dense("LlamaForCausalLM"), "nvfp4", extra=kv_scales(2)),
    "Meta-Llama-3.1-8B-Instruct-FP8-dynamic": Pair(dense("LlamaForCausalLM"), "fp8 dynamic", extra=kv_scales(2)),
    "Meta-Llama-3.1-8B-Instruct-FP8": Pair(dense("LlamaForCausalLM"), "fp8 static"),
    "Llama-3.1-405B-Instruct-FP8-KV (amd)": Pair(
        dense("LlamaForCausalLM"),
        "fp8 quark",
        extra={f"model.layers.0.self_attn.{kind}_proj.output_scale": torch.ones(1) for kind in "kv"},
    ),
    "Llama-3.3-70B-Instruct-quantized.w8a8": Pair(dense("LlamaForCausalLM"), "w8a8"),
    "Meta-Llama-3.1-8B-Instruct-AWQ-INT4": Pair(dense("LlamaForCausalLM"), "awq", extra=frequencies(2)),
    "Llama-3.2-1B-Instruct-bnb-4bit": Pair(dense("LlamaForCausalLM", tie_word_embeddings=True), "nf4"),
    "Qwen2.5-7B-Instruct-GPTQ-Int4": Pair(dense("Qwen2ForCausalLM"), "gptq"),
    "Qwen2.5-7B-Instruct-GPTQ-Int8": Pair(dense("Qwen2ForCausalLM"), "gptq int8"),
    "Qwen2.5-32B-Instruct-AWQ": Pair(dense("Qwen2ForCausalLM"), "awq"),
    "Qwen3-8B-FP8": Pair(dense("Qwen3ForCausalLM"), "fp8 blocks"),
    "Qwen3-4B-MLX-4bit": Pair(
        dense("Qwen3ForCausalLM", tie_word_embeddings=True), "mlx", further=("embed_tokens", "lm_head")
    ),
    "Qwen3-14B-int4-AutoRound": Pair(dense("Qwen3ForCausalLM"), "auto-round"),
    "Mistral-Small-24B-Instruct-2501-FP8-dynamic": Pair(dense("MistralForCausalLM"), "fp8 dynamic"),
    "Devstral-2-123B-Instruct-2512": Pair(dense("Ministral3ForCausalLM"), "fp8 mistral"),
    "gemma-2-9b-it-AWQ-INT4": Pair(dense("Gemma2ForCausalLM"), "awq"),
    "gemma-3-1b-it-quantized.w4a16": Pair(dense("Gemma3ForCausalLM"), "w4a16"),
    "phi-4-FP8-dynamic": Pair(dense("Phi3ForCausalLM"), "fp8 dynamic"),
    "Phi-4-mini-instruct-GPTQ-Int4": Pair(dense("Phi3ForCausalLM"), "gptq"),
    "GLM-4-32B-0414-GPTQ-Int4": Pair(dense("Glm4ForCausalLM"), "gptq"),
    "Seed-OSS-36B-Instruct-AWQ": Pair(dense("SeedOssForCausalLM"), "w4a16 asymmetric"),
    "Seed-OSS-36B-Instruct-NVFP4": Pair(dense("SeedOssForCausalLM"), "nvfp4 compressed"),
    "SmolLM3-3B-FP8": Pair(dense("SmolLM3ForCausalLM"), "fp8 dynamic"),
    "Olmo-3.1-32B-Think-FP8": Pair(dense("Olmo3ForCausalLM"), "fp8 dynamic"),
    "EXAONE-4.0-32B-FP8": Pair(dense("Exaone4ForCausalLM"), "fp8 blocks, null"),
    "EXAONE-4.0-32B-AWQ": Pair(dense("Exaone4ForCausalLM"), "awq"),
    "granite-3.3-8b-instruct-FP8-dynamic": Pair(dense("GraniteForCausalLM"), "fp8 dynamic"),
    "Apertus-70B-Instruct-2509-FP8-dynamic": Pair(dense("ApertusForCausalLM"), "fp8 dynamic"),
    "c4ai-command-a-03-2025-w4a16": Pair(dense("Cohere2ForCausalLM"), "w4a16"),
    # Experts
    "Qwen3-30B-A3B-FP8": Pair(qwen3_moe, "fp8 blocks"),
    "Qwen3-30B-A3B-NVFP4": Pair(qwen3_moe, "nvfp4"),
    "Qwen3-30B-A3B-GPTQ-Int4": Pair(qwen3_moe, "gptq"),
    "Qwen3-30B-A3B-Instruct-2507-AWQ": Pair(qwen3_moe, "awq"),
    "Qwen3-Coder-30B-A3B-Instruct-AWQ-4bit": Pair(qwen3_moe, "w4a16 asymmetric"),
    "Mixtral-8x7B-Instruct-v0.1-AWQ": Pair(dense("MixtralForCausalLM"), "awq"),
    "Mixtral-8x7B-Instruct-v0.1-FP8-KV (amd)": Pair(dense("MixtralForCausalLM"), "fp8 quark"),
    "Qwen2-57B-A14B-Instruct-GPTQ-Int4": Pair(dense("Qwen2MoeForCausalLM", shared_expert_intermediate_size=64), "gptq"),
    "GLM-4.5-Air-FP8": Pair(GLM_AIR, "fp8 dynamic", mtp="model.layers.2"),
    "GLM-4.5-Air-AWQ-4bit": Pair(GLM_AIR, "w4a16", mtp="model.layers.2"),
    "GLM-4.6-NVFP4": Pair(GLM_AIR, "nvfp4 compressed", mtp="model.layers.2"),
    "GLM-4.7-MXFP4 (amd)": Pair(GLM_AIR, "mxfp4 quark", (ATTENTION,), mtp="model.layers.2"),
    "MiniMax-M2.5": Pair(dense("MiniMaxM2ForCausalLM"), "fp8 blocks"),
    "MiniMax-M2.5-NVFP4": Pair(dense("MiniMaxM2ForCausalLM"), "nvfp4", (ATTENTION,)),
    "MiniMax-M2.1-AWQ": Pair(dense("MiniMaxM2ForCausalLM"), "awq"),
    "MiMo-V2-Flash": Pair(dense("MiMoV2FlashForCausalLM"), "fp8 blocks", ("o_proj",), mtp="model.mtp.layers.0"),
    "Hunyuan-A13B-Instruct-GPTQ-Int4": Pair(dense("HunYuanMoEV1ForCausalLM"), "gptq"),
    "Hunyuan-A13B-Instruct-FP8": Pair(dense("HunYuanMoEV1ForCausalLM"), "fp8 static", extra=kv_scales(2)),
    "Hy3-FP8": Pair(dense("HYV3ForCausalLM", num_nextn_predict_layers=1), "fp8 blocks", mtp="model.layers.2"),
    "ERNIE-4.5-21B-A3B-Thinking-AWQ-4bit": Pair(dense("Ernie4_5_MoeForCausalLM"), "w4a16"),
    "dots.llm1.inst-FP8-dynamic": Pair(dense("Dots1ForCausalLM"), "fp8 dynamic"),
    "Phi-3.5-MoE-instruct-FP8": Pair(dense("PhimoeForCausalLM"), "fp8 dynamic"),
    "Trinity-Mini-FP8-Block": Pair(dense("AfmoeForCausalLM"), "fp8 blocks"),
    "Solar-Open-100B-NVFP4": Pair(dense("SolarOpenForCausalLM"), "nvfp4 compressed"),
    "K-EXAONE-236B-A23B-FP8": Pair(dense("ExaoneMoeForCausalLM"), "fp8 blocks", mtp="mtp.layers.0"),
    # Latent attention
    "DeepSeek-V3.1": Pair(V3, "fp8 blocks", mtp="model.layers.3"),
    "DeepSeek-V3.1-NVFP4": Pair(V3, "nvfp4", ("kv_a_proj", "kv_b_proj", "q_a_proj", "q_b_proj"), mtp="model.layers.3"),
    "DeepSeek-R1-AWQ": Pair(V3, "awq", mtp="model.layers.3"),
    "DeepSeek-R1-MXFP4 (amd)": Pair(V3, "mxfp4 quark", (ATTENTION,), mtp="model.layers.3"),
    "Kimi-K2-Instruct": Pair(latent("kimi-k2", attention_bias=False), "fp8 blocks"),
    "Kimi-K2-Thinking": Pair(latent("kimi-k2", attention_bias=False), "w4a16", (ATTENTION, SHARED, "mlp.gate_proj")),
    "DeepSeek-V3.2": Pair(
        latent("deepseek-v3.2", num_nextn_predict_layers=1), "fp8 blocks, ue8m0", mtp="model.layers.3"
    ),
    "DeepSeek-V3.2-NVFP4": Pair(latent("deepseek-v3.2"), "nvfp4", ("indexer", "_a_proj", "_b_proj")),
    "GLM-5-FP8": Pair(latent("glm-5", num_nextn_predict_layers=1), "fp8 blocks", mtp="model.layers.3"),
    "GLM-5.1-NVFP4": Pair(latent("glm-5"), "nvfp4", (ATTENTION, SHARED)),
    "GLM-4.7-Flash-FP8-Dynamic": Pair(latent("glm-4.7-flash"), "fp8 dynamic"),
    "GLM-4.7-Flash-AWQ-4bit": Pair(latent("glm-4.7-flash", num_nextn_predict_layers=1), "w4a16", mtp="model.layers.3"),
    "GLM-4.7-Flash-NVFP4": Pair(latent("glm-4.7-flash"), "nvfp4 compressed", ("kv_b_proj",)),
    # Recurrent layers
    "Qwen3-Next-80B-A3B-Instruct-FP8": Pair(QWEN3_NEXT, "fp8 blocks", ("in_proj_ba",), mtp="mtp.layers.0"),
    "Qwen3-Next-80B-A3B-Instruct-NVFP4": Pair(QWEN3_NEXT, "nvfp4", ("linear_attn",), mtp="mtp.layers.0"),
    "Qwen3-Coder-Next-AWQ-4bit": Pair(QWEN3_NEXT, "w4a16 asymmetric", ("linear_attn", SHARED)),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-FP8": Pair(recurrent("nemotron-3-nano"), "fp8 modelopt"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": Pair(recurrent("nemotron-3-nano"), "nvfp4", ("q_proj", "k_proj", "v_proj")),
    "NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": Pair(recurrent("nemotron-3-super"), "nvfp4", mtp="mtp.layers.0"),
    "NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": Pair(recurrent("nemotron-3-nano"), "nvfp4 and fp8"),
    "granite-4.0-h-tiny-FP8-dynamic": Pair(recurrent("granite-4-h"), "fp8 dynamic"),
    "Kimi-Linear-48B-A3B-Instruct-AWQ-4bit": Pair(
        recurrent("kimi-linear"), "w4a16", ("_a_proj", "_b_proj", "b_proj"), save=save_as_published
    ),
    "LFM2-8B-A1B-FP8": Pair(recurrent("lfm2-moe"), "fp8 dynamic"),
    "Falcon-H1-34B-Instruct-GPTQ-Int4": Pair(recurrent("falcon-h1"), "gptq"),
}
