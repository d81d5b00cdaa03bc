"""Tiny models of the families with recurrent layers, random enough for every feature of a family to matter.

The keys name the published models whose features they have.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.engine.checkpoints import EOS_TOKEN_ID, save_checkpoint

_SHAPE: dict[str, Any] = {
    "vocab_size": 385,  # divided by neither 2 nor 4
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}
_LFM2: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
_GATED_DELTA: dict[str, Any] = {
    "head_dim": 32,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_OLMO: dict[str, Any] = {name: value for name, value in _GATED_DELTA.items() if name != "head_dim"} | {
    "rope_parameters": {"rope_type": None, "rope_theta": None},  # as published
}
_KIMI: dict[str, Any] = {  # the fields of published checkpoints
    "linear_attn_config": {
        "full_attn_layers": [2],
        "kda_layers": [1, 3, 4],
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    "head_dim": 32,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 12,
    "mla_use_nope": True,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 40,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 2.446,
}
_QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": 16,
}
_HYBRID = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
_GRANITE: dict[str, Any] = _MAMBA | {
    "layer_types": _HYBRID,
    "shared_intermediate_size": 80,
    "num_local_experts": 0,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
_FALCON: dict[str, Any] = _MAMBA | {
    "mamba_d_ssm": 128,
    "num_hidden_layers": 3,
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "mlp_multipliers": [0.7, 1.3],
    "key_multiplier": 0.6,
    "attention_out_multiplier": 1.2,
    "attention_in_multiplier": 0.8,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6,
}
_NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "chunk_size": 16,
    "head_dim": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}

RECURRENT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", _LFM2 | {"block_multiple_of": 16, "tie_word_embeddings": True}),
    "lfm2-biases": (
        "lfm2",
        _LFM2 | {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "tie_embedding": False},
    ),
    "lfm2-moe": (
        "lfm2_moe",
        _LFM2
        | {"num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
        | {"routed_scaling_factor": 1.5},
    ),
    "qwen3-next": ("qwen3_next", _GATED_DELTA | _QWEN_EXPERTS | {"mlp_only_layers": [1]}),
    "qwen3-next-biases": ("qwen3_next", _GATED_DELTA | {"num_experts": 0, "attention_bias": True}),
    "qwen3.5": ("qwen3_5_text", _GATED_DELTA | {"tie_word_embeddings": True}),
    "qwen3.5-moe": ("qwen3_5_moe_text", _GATED_DELTA | _QWEN_EXPERTS | {"linear_num_key_heads": 8}),
    "olmo-hybrid": ("olmo_hybrid", _OLMO),
    "olmo-hybrid-rope": (
        "olmo_hybrid",
        _OLMO
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "linear_allow_neg_eigval": False}
        | {"attention_bias": True, "tie_word_embeddings": True},
    ),
    "kimi-linear": ("kimi_linear", _KIMI),
    "kimi-linear-groups": (
        "kimi_linear",
        _KIMI | {"num_expert_group": 4, "topk_group": 2, "q_lora_rank": 20, "moe_renormalize": False},
    ),
    "granite-4-h": ("granitemoehybrid", _GRANITE | {"tie_word_embeddings": True}),
    "granite-4-h-moe": (
        "granitemoehybrid",
        _GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 2, "mamba_n_groups": 1, "mamba_proj_bias": True},
    ),
    "granite-4": (
        "granitemoehybrid",
        _GRANITE | {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2, "position_embedding_type": "rope"},
    ),
    "bamba": ("bamba", _MAMBA | {"attn_layer_indices": [1, 3]}),
    "bamba-limits": ("bamba", _MAMBA | {"attn_layer_indices": [1], "time_step_limit": [0.5, 0.9]}),
    "falcon-h1": ("falcon_h1", _FALCON | {"mamba_rms_norm": False}),
    "falcon-h1-norm": (
        "falcon_h1",
        _FALCON
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": True}
        | {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True},
    ),
    "nemotron-h": (
        "nemotron_h",
        _NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]},
    ),
    "nemotron-3-nano": ("nemotron_h", _NEMOTRON | {"hybrid_override_pattern": "MEM*EM-"}),
    "nemotron-3-super": ("nemotron_h", _NEMOTRON | {"hybrid_override_pattern": "MEM*E", "moe_latent_size": 32}),
    "mamba2": (
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24, "chunk_size": 16, "num_hidden_layers": 3},
    ),
}

# transformers' generate computes steps without the limits that a prompt's have; of others the logits suffice.
_NOT_GENERATED = ("bamba-limits", "olmo-hybrid-rope", "kimi-linear-groups")
GENERATED = [name for name in RECURRENT_FAMILIES if name not in _NOT_GENERATED]

FURTHER = pytest.mark.exhaustive("further families with the same kinds of states; CI runs one of each kind")


def few(*names: str, long: Collection[str] = GENERATED) -> list[Any]:
    """Return GENERATED as parameters of a test: ``names`` for `make test`, those of ``long`` for CI's long tests."""
    marks = {name: [pytest.mark.long if name in long else FURTHER] for name in GENERATED if name not in names}
    return [pytest.param(name, marks=marks.get(name, [])) for name in GENERATED]


def sweep(*names: str) -> list[Any]:
    """Return GENERATED as parameters of a long test, which CI runs for ``names`` only."""
    all_others = pytest.mark.exhaustive("24 settings of every family; CI runs two")
    return [pytest.param(name, marks=pytest.mark.long if name in names else all_others) for name in GENERATED]


def recurrent_architecture(name: str) -> str:
    """Return the architecture of a tiny model."""
    model_type = RECURRENT_FAMILIES[name][0]
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]


def build_recurrent_model(name: str, **changes: Any) -> PreTrainedModel:
    """Return a seeded random float32 model of transformers."""
    model_type, options = RECURRENT_FAMILIES[name]
    fields = _SHAPE | options | changes
    if model_type == "nemotron_h":
        del fields["num_hidden_layers"]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    model.config.architectures = [type(model).__name__]
    with torch.no_grad():
        for parameter_name, parameter in (*model.named_parameters(), *model.named_buffers()):
            kind = parameter_name.rpartition(".")[2]
            if kind == "A_log":
                parameter.uniform_(-2.0, 1.0)
            elif kind in ("dt_bias", "D") or "bias" in kind:
                parameter.normal_(0.0, 0.3)
            elif "norm" in parameter_name:
                adds_one = name.startswith("qwen") and "linear_attn" not in parameter_name
                parameter.uniform_(-0.5, 0.5) if adds_one else parameter.uniform_(0.5, 1.5)
            elif kind == "weight" or "proj" in kind:
                parameter.normal_(0.0, 0.15)
    return model


def save_recurrent_model(name: str, path: Path) -> tuple[PreTrainedModel, str]:
    """Return a model and the directory ``path`` that it was saved to."""
    model = build_recurrent_model(name)
    return model, save_as_published(model, path)


# --- what transformers saves in another way than it is published ----------------------------------------------------


def save_as_published(model: PreTrainedModel, path: Path) -> str:
    """Save a model with the names and tensors of published checkpoints, and return the path."""
    saved = save_checkpoint(model, path)
    if model.config.model_type == "kimi_linear":
        _write_config_of_kimi_linear(model.config, path / "config.json")
    if (as_published := _AS_PUBLISHED.get(model.config.model_type)) is not None:
        weights = model.state_dict()
        if model.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        save_file(as_published(weights), path / "model.safetensors", {"format": "pt"})
    return saved


def _with_convolutions_apart(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights with those of each recurrent layer's convolution split into queries', keys' and values'."""
    published = dict[str, torch.Tensor]()
    for name, weight in weights.items():
        module, conv, kind = name.rpartition("conv1d")
        if not conv:
            published[name] = weight
            continue
        widths = [len(weights[f"{module}{part}_proj.weight"]) for part in "qkv"]
        for part, rows in zip("qkv", weight.split(widths), strict=True):
            published[f"{module}{part}_conv1d{kind}"] = rows.clone()
    return published


def _kimi_linear(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    published = dict[str, torch.Tensor]()
    for name, weight in _with_convolutions_apart(weights).items():
        name = name.replace(".forget_gate.", ".")
        if f"{name.partition('.mlp.')[0]}.mlp.gate.weight" in weights:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        module, experts, matrix = name.partition(".experts.")
        if not experts:
            published[name] = weight
            continue
        for expert, own in enumerate(weight):
            parts = {"w2": own} if matrix == "down_proj" else dict(zip(("w1", "w3"), own.chunk(2), strict=True))
            published |= {f"{module}.experts.{expert}.{part}.weight": rows.clone() for part, rows in parts.items()}
    return published


def _write_config_of_kimi_linear(config: Any, file: Path) -> None:
    """Write the fields of published checkpoints, whose names and lists of layers are others."""
    fields = json.loads(file.read_text())
    for name in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"):
        del fields[name]
    fields |= {"linear_attn_config": config.linear_attn_config, "rope_theta": 10000.0}
    own_code = {"AutoConfig": "configuration_kimi.KimiLinearConfig"}
    file.write_text(json.dumps(fields | {"auto_map": own_code}))


_AS_PUBLISHED = {"olmo_hybrid": _with_convolutions_apart, "kimi_linear": _kimi_linear}
