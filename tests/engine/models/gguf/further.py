"""What llama.cpp's converter does to models of DeepSeek, GLM and Cohere: tensors, names and metadata."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import torch

__all__ = ["ARCHITECTURES", "add_metadata", "tensors"]

_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = _EXPERTS | {
    "num_key_value_heads": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "head_dim": 32,  # what RoPE rotates
    "v_head_dim": 64,
    "num_nextn_predict_layers": 0,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
_COHERE = {"logit_scale": 0.0625, "layer_norm_eps": 1e-5, "tie_word_embeddings": True}

# As those of converted.py.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek2-v3": ("deepseek2", "deepseek_v3", _LATENT | {"rope_parameters": _YARN, "n_group": 4, "topk_group": 2}),
    "deepseek2-v2": (
        "deepseek2",
        "deepseek_v2",
        _LATENT
        | {"rope_parameters": _YARN, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
        | {"norm_topk_prob": False},
    ),
    "deepseek2-v2-lite": ("deepseek2", "deepseek_v2", _LATENT | {"q_lora_rank": None, "norm_topk_prob": False}),
    "deepseek2-glm": (
        "deepseek2",
        "glm4_moe_lite",
        _LATENT | {"rope_parameters": _HALF["rope_parameters"] | {"partial_rotary_factor": 1.0}},
    ),
    "glm4": ("glm4", "glm4", _HALF),
    "glm4v": ("glm4", "glm4", _HALF | {"attention_bias": True}),
    "glm4v-moe": ("glm4moe", "glm4_moe", _EXPERTS | _HALF | {"attention_bias": True}),
    "glm4moe": ("glm4moe", "glm4_moe", _EXPERTS | _HALF | {"use_qk_norm": True, "attention_bias": True}),
    "command-r": ("command-r", "cohere", _COHERE),
    "command-r-plus": ("command-r", "cohere", _COHERE | {"use_qk_norm": True}),
    "cohere2": ("cohere2", "cohere2", _COHERE | {"sliding_window": 9, "num_hidden_layers": 4}),
}


def tensors(model: Any) -> Iterator[tuple[str, tuple[int, ...], list[torch.Tensor]]]:
    """Yield the converter's tensors: the name that its tables know, their shape, and where the model has the values."""
    config = model.config
    stored = [(name, values) for name, values in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for name, values in (*model.named_parameters(), *stored):
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        block, _, matrix = name.partition(".mlp.experts.")
        if matrix == "gate_up_proj":
            for part, views in zip(("gate", "up"), values.data.chunk(2, dim=1), strict=True):
                yield f"{block}.mlp.experts.{part}_proj.weight", tuple(views.shape), list(views)
        elif matrix:
            yield f"{name}.weight", tuple(values.shape), list(values.data)
        elif name.endswith("kv_b_proj.weight"):
            heads = values.data.view(config.num_attention_heads, -1, values.shape[1])
            keys, parts = [head[: config.qk_nope_head_dim].T for head in heads], name.partition("kv_b")
            rest = [head[config.qk_nope_head_dim :] for head in heads]
            for half, views in (("k_b", keys), ("v_b", rest)):
                yield f"{parts[0]}{half}{parts[2]}", (len(views), *views[0].shape), views
        else:
            yield name, tuple(values.shape), [values.data]


def as_neighbours(stored: torch.Tensor, config: Any) -> torch.Tensor:
    """Return queries or keys of GLM-4.1V with the elements that RoPE rotates as neighbours; stored are two halves."""
    rotary = config.head_dim // 2
    heads = stored.reshape(-1, config.head_dim, *stored.shape[1:])
    first, second, rest = heads[:, : rotary // 2], heads[:, rotary // 2 : rotary], heads[:, rotary:]
    return torch.cat([torch.stack([first, second], dim=2).flatten(1, 2), rest], dim=1).reshape(stored.shape)


def add_metadata(writer: Any, architecture: str, config: Any) -> None:
    """Add the keys of the architecture."""
    rope = config.rope_parameters
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_eos_token_id(config.eos_token_id)
    if architecture == "deepseek2":
        _add_latent(writer, config)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(int(config.head_dim * rope.get("partial_rotary_factor", 1.0)))
    if architecture in ("command-r", "cohere2"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_logit_scale(config.logit_scale)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "cohere2":
        writer.add_sliding_window(config.sliding_window)
    if architecture in ("deepseek2", "glm4moe"):
        _add_experts(writer, config)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _add_latent(writer: Any, config: Any) -> None:
    writer.add_head_count_kv(1)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)


def _add_experts(writer: Any, config: Any) -> None:
    is_softmax = config.model_type == "deepseek_v2"
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(
        gguf.ExpertGatingFuncType.SOFTMAX if is_softmax else gguf.ExpertGatingFuncType.SIGMOID
    )
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
