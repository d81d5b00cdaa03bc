"""Tiny models of the families with latent attention, random enough for every feature of a family to matter.

The keys name the published models whose features they have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4ForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.engine.checkpoints import EOS_TOKEN_ID, save_checkpoint

_SHAPE: dict[str, Any] = {
    "vocab_size": 385,  # divided by neither 2 nor 4
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_V3: dict[str, Any] = _EXPERTS | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True}
_MISTRAL: dict[str, Any] = _EXPERTS | {"n_group": 4, "topk_group": 2, "norm_topk_prob": True}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.1 * i for i in range(8)],
    "original_max_position_embeddings": 1024,
}

_INDEX: dict[str, Any] = {"index_n_heads": 8, "index_head_dim": 24, "index_topk": 8}

LATENT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": (
        "deepseek_v2",
        _EXPERTS
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "rope_parameters": YARN}
        | {"first_k_dense_replace": 1},
    ),
    "deepseek-v2-lite": ("deepseek_v2", _EXPERTS | {"q_lora_rank": None, "routed_scaling_factor": 1.0}),
    "deepseek-v3": ("deepseek_v3", _V3 | {"rope_parameters": YARN}),
    "deepseek-v3-halves": ("deepseek_v3", _V3 | {"rope_interleave": False, "norm_topk_prob": False, "topk_group": 4}),
    "kimi-k2": (
        "deepseek_v3",
        _V3 | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "attention_bias": True, "rms_norm_eps": 1e-5},
    ),
    "glm-4.7-flash": ("glm4_moe_lite", _EXPERTS | {"n_shared_experts": 1, "v_head_dim": 36, "rms_norm_eps": 1e-5}),
    "deepseek-v3.2": ("deepseek_v32", _V3 | _INDEX | {"rope_parameters": YARN}),
    "glm-5": ("glm_moe_dsa", _EXPERTS | _INDEX | {"n_shared_experts": 1, "first_k_dense_replace": 1, "index_topk": 6}),
    "glm-5.2": (
        "glm_moe_dsa",
        _EXPERTS
        | _INDEX
        | {"n_shared_experts": 1, "v_head_dim": 36, "rms_norm_eps": 1e-5}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "indexer_types": ["full", "shared", "full"]},
    ),
    "minicpm3": (
        "minicpm3",
        {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 32, "tie_word_embeddings": True}
        | {"rope_parameters": _LONGROPE},
    ),
    "mistral-4": ("mistral4", _MISTRAL | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}}),
    "youtu": ("youtu", {"tie_word_embeddings": True, "q_lora_rank": None}),
}


def latent_architecture(name: str) -> str:
    """Return the architecture of a tiny model."""
    model_type = LATENT_FAMILIES[name][0]
    return "Mistral4ForCausalLM" if model_type == "mistral4" else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]


def build_latent_model(name: str, **changes: Any) -> PreTrainedModel:
    """Return a seeded random float32 model of transformers."""
    model_type, options = LATENT_FAMILIES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **_SHAPE | options | changes)
    model: PreTrainedModel
    if model_type == "mistral4":  # which AutoModel knows only as a part of a multimodal model
        model = Mistral4ForCausalLM(config).eval()
    else:
        model = AutoModelForCausalLM.from_config(config).eval()
    model.config.architectures = [type(model).__name__]
    with torch.no_grad():
        for parameter_name, parameter in (*model.named_parameters(), *model.named_buffers()):
            kind = parameter_name.rpartition(".")[2]
            if "bias" in kind:
                parameter.normal_(0.0, 0.3)
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif kind == "weight" or "proj" in kind:
                parameter.normal_(0.0, 0.15)
    return model


def save_latent_model(name: str, path: Path, **changes: Any) -> tuple[PreTrainedModel, str]:
    """Return a model and the directory under ``path`` that it was saved to."""
    model = build_latent_model(name, **changes)
    return model, save_checkpoint(model, path)
