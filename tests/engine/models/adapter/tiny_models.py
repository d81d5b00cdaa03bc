"""Tiny random models of every architecture that the adapter serves, with the options that make it what it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 120
WINDOW = 9  # tokens: no multiple of a block, and shorter than the contexts of the tests

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HALF_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = _EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_ROUTED |= {"first_k_dense_replace": 1}


@dataclass(frozen=True)
class TinyModel:
    """One architecture: transformers' name of its config, and options beside the common shape."""

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)


TINY_MODELS: dict[str, TinyModel] = {
    "AfmoeForCausalLM": TinyModel("afmoe", _EXPERTS | _HALF_SLIDING | {"head_dim": 16, "num_dense_layers": 1}),
    "ApertusForCausalLM": TinyModel("apertus"),
    "ArceeForCausalLM": TinyModel("arcee"),
    "AriaTextForCausalLM": TinyModel("aria_text", {"moe_num_experts": 4, "moe_topk": 2}),
    "BeamForCausalLM": TinyModel("beam", _EXPERTS | _HALF_SLIDING | {"head_dim": 16}),
    "BioGptForCausalLM": TinyModel("biogpt"),
    "BitNetForCausalLM": TinyModel("bitnet"),
    "CohereForCausalLM": TinyModel("cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    "Cohere2ForCausalLM": TinyModel("cohere2", _HALF_SLIDING | {"logit_scale": 0.25}),
    "Cohere2MoeForCausalLM": TinyModel("cohere2_moe", _EXPERTS | _HALF_SLIDING | {"head_dim": 16}),
    "CTRLLMHeadModel": TinyModel("ctrl", {"dff": 40}),
    "CwmForCausalLM": TinyModel("cwm", _HALF_SLIDING | {"head_dim": 16}),
    "DbrxForCausalLM": TinyModel(
        "dbrx",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 1.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "DiffLlamaForCausalLM": TinyModel("diffllama"),
    "Dots1ForCausalLM": TinyModel("dots1", _ROUTED | _HALF_SLIDING),
    "Ernie4_5ForCausalLM": TinyModel("ernie4_5", {"head_dim": 16}),
    "Ernie4_5_MoeForCausalLM": TinyModel("ernie4_5_moe", _EXPERTS | {"moe_num_experts": 4, "moe_k": 2}),
    "Exaone4ForCausalLM": TinyModel("exaone4", _HALF_SLIDING),
    "ExaoneMoeForCausalLM": TinyModel("exaone_moe", _ROUTED | _HALF_SLIDING | {"head_dim": 16}),
    "FlexOlmoForCausalLM": TinyModel("flex_olmo", _EXPERTS),
    "FlintForCausalLM": TinyModel(
        "flint",
        _EXPERTS | _HALF_SLIDING | {"head_dim": 16, "mlp_only_layers": [0], "shared_expert_intermediate_size": 24},
    ),
    "GemmaForCausalLM": TinyModel("gemma", {"head_dim": 16}),
    "Gemma2ForCausalLM": TinyModel(
        "gemma2",
        _HALF_SLIDING
        | {"head_dim": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 20},
    ),
    "Gemma3ForCausalLM": TinyModel("gemma3_text", _HALF_SLIDING | {"head_dim": 16, "query_pre_attn_scalar": 20}),
    "GlmForCausalLM": TinyModel("glm", {"head_dim": 16}),
    "Gemma3nForCausalLM": TinyModel(
        "gemma3n_text",
        {
            "head_dim": 16,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] + _HALF_SLIDING["layer_types"],
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "laurel_rank": 4,
            "altup_num_inputs": 3,
            "activation_sparsity_pattern": [0.8, 0.8, 0.0, 0.0, 0.0],
        },
    ),
    "Glm4ForCausalLM": TinyModel("glm4", {"head_dim": 16}),
    "Glm4MoeForCausalLM": TinyModel("glm4_moe", _ROUTED | {"head_dim": 16, "use_qk_norm": True}),
    "GPT2LMHeadModel": TinyModel("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "GPTBigCodeForCausalLM": TinyModel("gpt_bigcode"),
    "GPTNeoXForCausalLM": TinyModel("gpt_neox", {"use_parallel_residual": True}),
    "GptOssForCausalLM": TinyModel("gpt_oss", _EXPERTS | _HALF_SLIDING | {"head_dim": 16}),
    "GraniteForCausalLM": TinyModel(
        "granite",
        {"attention_multiplier": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    ),
    "GraniteSWAForCausalLM": TinyModel("granite_swa", _HALF_SLIDING),
    "GraniteMoeForCausalLM": TinyModel("granitemoe", _EXPERTS | {"attention_multiplier": 0.5, "logits_scaling": 2.0}),
    "GraniteMoeSWAForCausalLM": TinyModel("granitemoe_swa", _EXPERTS | _HALF_SLIDING),
    "GraniteMoeSharedForCausalLM": TinyModel("granitemoeshared", _EXPERTS | {"shared_intermediate_size": 24}),
    "HeliumForCausalLM": TinyModel("helium", {"head_dim": 8}),
    "HrmTextForCausalLM": TinyModel("hrm_text", {"head_dim": 8}),
    "HunYuanDenseV1ForCausalLM": TinyModel("hunyuan_v1_dense", {"head_dim": 16}),
    "HunYuanMoEV1ForCausalLM": TinyModel("hunyuan_v1_moe", _EXPERTS | {"head_dim": 16, "moe_topk": 2}),
    "HYV3ForCausalLM": TinyModel("hy_v3", _ROUTED | {"head_dim": 16}),
    "HyperCLOVAXForCausalLM": TinyModel("hyperclovax"),
    "Jais2ForCausalLM": TinyModel("jais2"),
    "JetMoeForCausalLM": TinyModel("jetmoe", _EXPERTS | {"kv_channels": 16}),
    "Kolibri1ForCausalLM": TinyModel(
        "kolibri1", _HALF_SLIDING | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
    ),
    "LagunaForCausalLM": TinyModel("laguna", _EXPERTS | _HALF_SLIDING | {"head_dim": 16}),
    "LlamaForCausalLM": TinyModel("llama"),
    "MellumForCausalLM": TinyModel("mellum", _EXPERTS | _HALF_SLIDING | {"head_dim": 16}),
    "MinistralForCausalLM": TinyModel("ministral", _HALF_SLIDING | {"head_dim": 16}),
    "Ministral3ForCausalLM": TinyModel(
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "MiMoV2FlashForCausalLM": TinyModel(
        "mimo_v2_flash",
        _EXPERTS
        | _HALF_SLIDING
        | {"head_dim": 24, "v_head_dim": 16, "n_routed_experts": 4, "routed_scaling_factor": 1.5},
    ),
    "MiniMaxM2ForCausalLM": TinyModel("minimax_m2", _EXPERTS | {"head_dim": 16}),
    "MistralForCausalLM": TinyModel("mistral", {"sliding_window": WINDOW}),
    "MixtralForCausalLM": TinyModel("mixtral", _EXPERTS | {"sliding_window": WINDOW}),
    "ModernBertDecoderForCausalLM": TinyModel("modernbert-decoder", _HALF_SLIDING),
    "NanoChatForCausalLM": TinyModel("nanochat"),
    "NemotronForCausalLM": TinyModel("nemotron"),
    "OlmoForCausalLM": TinyModel("olmo", {"clip_qkv": 0.5}),
    "Olmo2ForCausalLM": TinyModel("olmo2"),
    "Olmo3ForCausalLM": TinyModel("olmo3", _HALF_SLIDING),
    "OlmoeForCausalLM": TinyModel("olmoe", _EXPERTS),
    "OPTForCausalLM": TinyModel("opt", {"ffn_dim": 40, "word_embed_proj_dim": 24}),
    "PersimmonForCausalLM": TinyModel("persimmon"),
    "PhiForCausalLM": TinyModel("phi", {"qk_layernorm": True}),
    "Phi3ForCausalLM": TinyModel("phi3", {"sliding_window": WINDOW}),
    "PhimoeForCausalLM": TinyModel("phimoe", _EXPERTS),
    "Qwen2ForCausalLM": TinyModel("qwen2", _HALF_SLIDING | {"use_sliding_window": True}),
    "Qwen2MoeForCausalLM": TinyModel("qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 24}),
    "Qwen3ForCausalLM": TinyModel("qwen3", {"head_dim": 16}),
    "Qwen3MoeForCausalLM": TinyModel("qwen3_moe", _EXPERTS | {"head_dim": 16}),
    "SeedOssForCausalLM": TinyModel("seed_oss", {"head_dim": 16}),
    "SmolLM3ForCausalLM": TinyModel("smollm3", {"no_rope_layers": [1, 0]}),
    "SolarOpenForCausalLM": TinyModel("solar_open", _ROUTED | {"head_dim": 16}),
    "StableLmForCausalLM": TinyModel("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "Starcoder2ForCausalLM": TinyModel("starcoder2", {"sliding_window": WINDOW}),
    "VaultGemmaForCausalLM": TinyModel(
        "vaultgemma", _HALF_SLIDING | {"head_dim": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}
    ),
}


def build_config(architecture: str, **options: Any) -> PreTrainedConfig:
    """Return the config of a tiny model, with further options."""
    tiny = TINY_MODELS[architecture]
    config: PreTrainedConfig = AutoConfig.for_model(tiny.model_type, **_SHAPE | tiny.options | options)
    config.architectures = [architecture]
    return config


def build_model(architecture: str, **options: Any) -> PreTrainedModel:
    """Return a seeded random float32 model whose attention, biases and norms all matter to its answers."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(build_config(architecture, **options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith("weight"):  # a norm
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.25)
    return model
