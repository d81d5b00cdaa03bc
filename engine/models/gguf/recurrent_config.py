"""RECURRENT: the fields of a config.json, besides those of all architectures, of models with recurrent layers.

Which layers are recurrent is known from their numbers of KV heads, of which these have none. What the converter has
multiplied into weights, as Falcon-H1's multipliers, is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.models.gguf.fields import Fields
from engine.models.gguf.file import GgufFile
from engine.models.gguf.rope import rope_parameters
from engine.models.gguf.sizes import has, key_length, num_layers, whole_rope

__all__ = ["RECURRENT"]

_ONES = [1.0] * 5  # of gates, inputs, keys, queries and steps


def _kv_heads(fields: Fields) -> list[int]:
    """Return the KV heads of each layer, 0 for one without attention."""
    counts = fields.integers("attention.head_count_kv", num_layers(fields))
    if not set(counts) <= {0, max(counts)}:
        raise fields.error(
            f"{fields.architecture}.attention.head_count_kv differs between layers with attention, which is not "
            "supported; give another model"
        )
    return counts


def _attention(fields: Fields, kv_heads: list[int]) -> dict[str, Any]:
    """Return the fields of the layers with attention."""
    return {
        "num_attention_heads": fields.integer("attention.head_count"),
        "num_key_value_heads": max(kv_heads) or 1,
        "head_dim": key_length(fields),
    }


def _head_size(fields: Fields) -> int:
    """Return the elements of a recurrent layer's head."""
    inner, heads = fields.integer("ssm.inner_size"), fields.integer("ssm.time_step_rank")
    if inner % heads:
        raise fields.error(
            f"{fields.architecture}.ssm.inner_size={inner} is not divided by its {heads} heads; download it again"
        )
    return inner // heads


def _is_in_any_layer(gguf: GgufFile, name: str) -> bool:
    return any(tensor.startswith("blk.") and tensor.endswith(f".{name}") for tensor in gguf.tensors)


# --- gated delta rule ----------------------------------------------------------------------------------------------


def _qwen35(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    count = num_layers(fields) - fields.integer("nextn_predict_layers", 0, smallest=0)
    interval = fields.integer("full_attention_interval", 4)
    head_dim = key_length(fields)
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    rope = rope_parameters(fields, rotary_dim) | {"partial_rotary_factor": rotary_dim / head_dim}
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "num_hidden_layers": count,
        "num_attention_heads": fields.integer("attention.head_count"),
        "num_key_value_heads": fields.integer("attention.head_count_kv"),
        "head_dim": head_dim,
        "intermediate_size": fields.integer(
            "feed_forward_length",
            fields.integer("expert_feed_forward_length", 1),  # all layers may have experts
        ),
        "layer_types": ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)],
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
        "linear_key_head_dim": fields.integer("ssm.state_size"),
        "linear_num_key_heads": fields.integer("ssm.group_count"),
        "linear_num_value_heads": fields.integer("ssm.time_step_rank"),
        "linear_value_head_dim": _head_size(fields),
        "rope_parameters": rope,
    }


def _qwen35_moe(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    return _qwen35(gguf, fields) | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length"),
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
    }


# --- convolutions --------------------------------------------------------------------------------------------------


def _lfm2(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    kv_heads = _kv_heads(fields)
    return _attention(fields, kv_heads) | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "intermediate_size": fields.integer("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,  # the file has the adjusted size
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": fields.integer("shortconv.l_cache"),
        "conv_bias": _is_in_any_layer(gguf, "shortconv.in_proj.bias"),
        "rope_parameters": whole_rope(fields),
    }


# --- Mamba 2 -------------------------------------------------------------------------------------------------------


def _mamba(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    """Return the sizes of Mamba layers as Granite, Bamba and Falcon-H1 name them."""
    return {
        "mamba_n_heads": fields.integer("ssm.time_step_rank"),
        "mamba_d_head": _head_size(fields),
        "mamba_n_groups": fields.integer("ssm.group_count", 1),
        "mamba_d_state": fields.integer("ssm.state_size"),
        "mamba_d_conv": fields.integer("ssm.conv_kernel"),
        "mamba_conv_bias": _is_in_any_layer(gguf, "ssm_conv1d.bias"),
        "mamba_proj_bias": _is_in_any_layer(gguf, "ssm_in.bias"),
    }


def _mamba2(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    mamba = _mamba(gguf, fields)
    inner, hidden = fields.integer("ssm.inner_size"), fields.integer("embedding_length")
    if inner % hidden:
        raise fields.error(
            f"mamba2.ssm.inner_size={inner} is not a multiple of its {hidden} features; download it again"
        )
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_heads": mamba["mamba_n_heads"],
        "head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "use_bias": mamba["mamba_proj_bias"],
        "expand": inner // hidden,
        "layer_norm_epsilon": fields.number("attention.layer_norm_rms_epsilon"),
    }


def _falcon_h1(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    return _attention(fields, [fields.integer("attention.head_count_kv")]) | _mamba(gguf, fields) | {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "hidden_act": "silu",
        "intermediate_size": fields.integer("feed_forward_length"),
        "mamba_d_ssm": fields.integer("ssm.inner_size"),
        "mamba_rms_norm": has(gguf, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": False,
        "attention_bias": has(gguf, "attn_q.bias"),
        "mlp_bias": has(gguf, "ffn_down.bias"),
        "rope_parameters": whole_rope(fields),
        "ssm_multipliers": _ONES,
        "mlp_multipliers": _ONES[:2],
        **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier", "key_multiplier"), 1.0),
        **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), 1.0),
        **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
    }  # fmt: skip


def _granite_hybrid(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    if fields.boolean("rope.scaling.finetuned", False):
        raise fields.error("it is a Bamba, whose attention rotates; give its Hugging Face checkpoint's directory")
    kv_heads = _kv_heads(fields)
    attention = _attention(fields, kv_heads)
    num_experts = fields.integer("expert_count", 0, smallest=0)
    experts = {"num_experts_per_tok": fields.integer("expert_used_count")} if num_experts else {}
    width = fields.integer("feed_forward_length")
    return attention | experts | _mamba(gguf, fields) | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_act": "silu",
        "intermediate_size": width,
        "shared_intermediate_size": fields.integer("expert_shared_feed_forward_length", width),
        "num_local_experts": num_experts,
        "layer_types": ["full_attention" if heads else "linear_attention" for heads in kv_heads],
        "position_embedding_type": "nope",
        "attention_bias": _is_in_any_layer(gguf, "attn_q.bias"),
        "attention_multiplier": fields.number("attention.scale", attention["head_dim"] ** -0.5),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "logits_scaling": fields.number("logit_scale", 1.0),
    }  # fmt: skip


def _nemotron_h(gguf: GgufFile, fields: Fields) -> dict[str, Any]:
    """Read Nemotron-H; Nemotron 3's feed-forwards are experts."""
    kv_heads = _kv_heads(fields)
    widths = fields.integers("feed_forward_length", len(kv_heads))
    mamba, has_experts = _mamba(gguf, fields), fields.architecture == "nemotron_h_moe"
    feed_forward = "E" if has_experts else "-"
    return _attention(fields, kv_heads) | (_nemotron_experts(fields) if has_experts else {}) | {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "".join(
            "*" if heads else feed_forward if width else "M" for heads, width in zip(kv_heads, widths, strict=True)
        ),
        "intermediate_size": max(widths) or 1,
        "layer_norm_epsilon": fields.number("attention.layer_norm_rms_epsilon"),
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "use_bias": mamba["mamba_proj_bias"],
        "attention_bias": _is_in_any_layer(gguf, "attn_q.bias"),
        "mlp_bias": _is_in_any_layer(gguf, "ffn_down.bias"),
    }  # fmt: skip


def _nemotron_experts(fields: Fields) -> dict[str, Any]:
    return {
        "n_routed_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length"),
        "moe_latent_size": fields.integer("moe_latent_size", 0, smallest=0) or None,
        "norm_topk_prob": fields.boolean("expert_weights_norm", True),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        "n_group": fields.integer("expert_group_count", 1),
    }


RECURRENT: dict[str, Callable[[GgufFile, Fields], dict[str, Any]]] = {
    "qwen35": _qwen35,
    "qwen35moe": _qwen35_moe,
    "qwen3next": _qwen35_moe,  # computes the same; only published weights have other names
    "lfm2": _lfm2,
    "mamba2": _mamba2,
    "falcon-h1": _falcon_h1,
    "granitehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
}
