"""FURTHER: the fields of a config.json, besides those of all architectures, of DeepSeek, GLM and Cohere models.

llama.cpp's `deepseek2` is any model with the latent attention of DeepSeek V2 and V3: also Kimi K2 and GLM-4.7-Flash.
How it scores experts tells V3's kind from V2's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import shown
from engine.models.gguf.fields import Fields
from engine.models.gguf.file import GgufFile
from engine.models.gguf.rope import rope_parameters
from engine.models.gguf.sizes import has, head_dim_of, layer_types, num_layers, whole_rope

__all__ = ["FURTHER"]

_SOFTMAX, _SIGMOID = 1, 2  # how routers score experts
# Groups of experts, and those that are chosen, of files without them, by the scores and the number of experts.
_GROUPS = {(_SIGMOID, 256): (8, 4), (_SOFTMAX, 160): (8, 3)}  # DeepSeek V3 and V2
_COHERE2_PERIOD = 4


def _gating(fields: Fields) -> int:
    gating = fields.integer("expert_gating_func", _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise fields.error(
            f"{fields.architecture}.expert_gating_func={gating} is not supported; only {_SOFTMAX} (softmax) and "
            f"{_SIGMOID} (sigmoid) are; give another model"
        )
    return gating


def _experts(fields: Fields) -> dict[str, Any]:
    """Return the fields of routed and shared experts."""
    count = fields.integer("expert_count")
    num_groups, num_chosen = _GROUPS.get((_gating(fields), count), (1, 1))
    return {
        "intermediate_size": fields.integer("feed_forward_length"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "n_routed_experts": count,
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "n_shared_experts": fields.integer("expert_shared_count", 0, smallest=0) or None,
        "first_k_dense_replace": fields.integer("leading_dense_block_count", 0, smallest=0),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": fields.boolean("expert_weights_norm", False),
        "n_group": fields.integer("expert_group_count", num_groups),
        "topk_group": fields.integer("expert_group_used_count", num_chosen),
        "hidden_act": "silu",
    }


def _layers(fields: Fields) -> dict[str, Any]:
    """Return the number of layers, and of those after them that predict further tokens."""
    further = fields.integer("nextn_predict_layers", 0, smallest=0)
    own = {"num_hidden_layers": max(num_layers(fields) - further, 1)}
    return own | ({"num_nextn_predict_layers": further} if further else {})


def _deepseek2(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    if "attention.temperature_scale" in fields:
        raise fields.error("it scales queries by their position, which is not supported for 'deepseek2'")
    rotary = fields.integer("rope.dimension_count")
    suffix = "_mla" if "attention.key_length_mla" in fields else ""  # else the file is older, or of whole keys
    key, value = (fields.integer(f"attention.{part}_length{suffix}") for part in ("key", "value"))
    if key <= rotary:
        raise fields.error(
            f"its keys of {key} elements are no longer than the {rotary} that RoPE rotates; download it again"
        )
    heads, is_v3 = fields.integer("attention.head_count"), _gating(fields) == _SIGMOID
    config = _experts(fields) | {
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": fields.integer("attention.q_lora_rank") if "attention.q_lora_rank" in fields else None,
        "kv_lora_rank": fields.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
        "attention_bias": has(gguf, "attn_q_a.bias"),
        "rope_parameters": _latent_rope(fields, rotary),
    }
    if is_v3:
        config["num_nextn_predict_layers"] = 0  # unless the file has some
    else:
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    return config | _layers(fields)


def _latent_rope(fields: Fields, rotary: int) -> dict[str, Any]:
    """Return the parameters of RoPE; what scales attention with YaRN is stored as a tenth."""
    rope = rope_parameters(fields, rotary)
    if rope["rope_type"] == "yarn":
        scale = round(10 * fields.number("rope.scaling.yarn_log_multiplier", 0.0), 6)
        rope |= {"mscale": scale, "mscale_all_dim": scale} if scale else {"attention_factor": 1.0}
    return rope


def _partial_rope(fields: Fields) -> dict[str, Any]:
    """Return the parameters of RoPE over a part of each head."""
    head_dim = head_dim_of(fields)
    rotary = fields.integer("rope.dimension_count", head_dim)
    if rotary > head_dim:
        raise fields.error(
            f"{fields.architecture}.rope.dimension_count={shown(rotary)} is more than the head's {head_dim}; "
            "download it again"
        )
    return rope_parameters(fields, rotary) | {"partial_rotary_factor": rotary / head_dim}


def _glm4(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    return _layers(fields) | {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "hidden_act": "silu",
        "intermediate_size": fields.integer("feed_forward_length"),
        "attention_bias": has(gguf, "attn_q.bias"),
        "rope_parameters": _partial_rope(fields),
    }


def _glm4_moe(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    if _gating(fields) != _SIGMOID:
        raise fields.error("glm4moe.expert_gating_func is not 2 (sigmoid), which its models have; download it again")
    return (
        _experts(fields)
        | _layers(fields)
        | {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "attention_bias": has(gguf, "attn_q.bias"),
            "use_qk_norm": has(gguf, "attn_q_norm.weight"),
            "rope_parameters": _partial_rope(fields),
        }
    )


def _cohere(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    return {
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        "hidden_act": "silu",
        "intermediate_size": fields.integer("feed_forward_length"),
        "layer_norm_eps": fields.number("attention.layer_norm_epsilon"),
        "logit_scale": fields.positive("logit_scale"),
        "attention_bias": has(gguf, "attn_q.bias"),
        "use_qk_norm": has(gguf, "attn_q_norm.weight"),
        "rope_parameters": whole_rope(fields),
    }


def _cohere2(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    config = _cohere(gguf, fields) | {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": layer_types(fields, _COHERE2_PERIOD),
    }
    del config["use_qk_norm"]
    return config


FURTHER: dict[str, Callable[[GgufFile, Fields], dict[str, Any]]] = {
    "deepseek2": _deepseek2,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "command-r": _cohere,
    "cohere2": _cohere2,
}
