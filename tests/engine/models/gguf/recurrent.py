"""What llama.cpp's converter does to models with recurrent layers: shapes, tensors, orders and metadata."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["ARCHITECTURES", "FORCED_FLOAT32", "add_metadata", "restored", "small_values", "stored_values", "tensors"]

STORED_BUFFERS = ("correction_bias", "layer_scalar")
_GATED_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 32}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}

# As those of converted.py. Falcon-H1's multipliers are 1, because the converter multiplies them into the weights.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen35": ("qwen35", "qwen3_5_text", _GATED_DELTA | {"tie_word_embeddings": True}),
    "qwen35moe": ("qwen35moe", "qwen3_5_moe_text", _GATED_DELTA | _EXPERTS | {"shared_expert_intermediate_size": 256}),
    "qwen3next": ("qwen3next", "qwen3_5_moe_text", _GATED_DELTA | _EXPERTS | {"shared_expert_intermediate_size": 256}),
    "lfm2": (
        "lfm2",
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
    ),
    "mamba2": (
        "mamba2",
        "mamba2",
        {"num_heads": 8, "head_dim": 64, "n_groups": 2, "state_size": 32, "chunk_size": 16, "layer_norm_epsilon": 1e-5},
    ),
    "falcon-h1": ("falcon-h1", "falcon_h1", _MAMBA | _ROPE | {"mamba_d_ssm": 512, "mamba_rms_norm": True,
                                                              "mamba_norm_before_gate": False}),
    "granitehybrid": (
        "granitehybrid",
        "granitemoehybrid",
        _MAMBA
        | {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 256}
        | {"num_local_experts": 0, "position_embedding_type": "nope", "embedding_multiplier": 3.0}
        | {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "granitehybrid-moe": (
        "granitehybrid",
        "granitemoehybrid",
        _MAMBA
        | {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 512}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "nope"}
        | {"embedding_multiplier": 1.5, "attention_multiplier": 0.25, "tie_word_embeddings": True},
    ),
    "nemotron_h": (
        "nemotron_h",
        "nemotron_h",
        {"mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 32, "chunk_size": 16}
        | {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "layer_norm_epsilon": 1e-5},
    ),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        "nemotron_h",
        {"mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 32, "chunk_size": 16}
        | {"hybrid_override_pattern": "ME*E", "layer_norm_epsilon": 1e-5, "n_routed_experts": 4, "moe_latent_size": 256}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 512}
        | {"routed_scaling_factor": 2.5},
    ),
}  # fmt: skip
FORCED_FLOAT32 = ("ssm_conv1d", "shortconv.conv", "ssm_a", "ssm_d", "ssm_norm", "ffn_gate_inp")


# --- tensors ---------------------------------------------------------------------------------------------------------


def tensors(model: Any, architecture: str) -> Iterator[tuple[str, tuple[int, ...], list[torch.Tensor]]]:
    """Yield the converter's tensors: the name that gguf's tables know, the stored shape, and where the values belong.

    There are several places where the converter splits a parameter, or stacks those of experts.
    """
    config, is_dense = model.config, not getattr(model.config, "num_local_experts", 0)
    for name, values in stored_values(model):
        name = name.replace("model.layers", "backbone.layers") if config.model_type == "nemotron_h" else name
        block, _, module = name.partition(".shared_mlp.")
        if module:
            kind = "" if is_dense else "shexp"
            if module.startswith("input_linear"):
                for part, half in zip(("gate", "up"), values.chunk(2), strict=True):
                    yield f"{_blk(block)}.ffn_{part}_{kind}".rstrip("_") + ".weight", tuple(half.shape), [half]
            else:
                yield f"{_blk(block)}.ffn_down_{kind}".rstrip("_") + ".weight", tuple(values.shape), [values]
        elif architecture == "qwen3next" and name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
            if name.endswith("in_proj_b.weight"):
                betas, alphas = values, dict(stored_values(model))[name.replace("in_proj_b", "in_proj_a")]
                rows = zip(*(half.chunk(config.linear_num_key_heads) for half in (betas, alphas)), strict=True)
                views = [row for of_key in rows for half in of_key for row in half]
                yield name.replace("in_proj_b", "in_proj_ba"), (len(views), values.shape[1]), views
        elif ".experts." in name:
            yield from _expert_tensors(name, values)
        elif name.endswith("block_sparse_moe.router.weight"):
            yield f"{_blk(name)}.ffn_gate_inp.weight", tuple(values.shape), [values]
        elif name.endswith("e_score_correction_bias"):
            yield f"{_blk(name)}.exp_probs_b.bias", tuple(values.shape), [values]
        elif name.endswith("mixer.gate.weight"):
            yield f"{_blk(name)}.ffn_gate_inp.weight", tuple(values.shape), [values]
        elif name.endswith("dt_bias"):
            yield f"{_blk(name)}.ssm_dt.bias", tuple(values.shape), [values]
        elif name.endswith("shared_expert_gate.weight"):
            yield name, (values.shape[1],), [values]
        else:
            yield name, _stored_shape(name, values, config), [values]


def stored_values(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, and the buffers that checkpoints have."""
    yield from ((name, parameter.data) for name, parameter in model.named_parameters())
    yield from ((name, values) for name, values in model.named_buffers() if name.endswith(STORED_BUFFERS))


def _blk(name: str) -> str:
    return "blk." + next(part for part in name.split(".") if part.isdigit())


def _stored_shape(name: str, values: torch.Tensor, config: Any) -> tuple[int, ...]:
    if name.endswith((".A_log", ".D")) and not config.model_type.startswith("qwen"):
        return len(values), 1
    if "conv" in name and values.dim() == 3:
        return values.shape[0], values.shape[2]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        groups = getattr(config, "mamba_n_groups", None) or config.n_groups
        return groups, len(values) // groups
    return tuple(values.shape)


def _expert_tensors(name: str, values: torch.Tensor) -> Iterator[tuple[str, tuple[int, ...], list[torch.Tensor]]]:
    if "gate_up" in name:
        parts = dict(zip(("gate", "up"), values.chunk(2, dim=1), strict=True))
    else:
        parts = {"down" if "down" in name else "up": values}
    for part, half in parts.items():
        yield f"{_blk(name)}.ffn_{part}_exps.weight", tuple(half.shape), list(half)


def restored(decoded: torch.Tensor, name: str, shape: torch.Size, config: Any, architecture: str) -> torch.Tensor:
    """Return what transformers has where the converter has written ``decoded``."""
    kind = config.model_type
    if name.endswith("A_log"):
        decoded = torch.log(-decoded)
    if kind.startswith("qwen"):
        if name.endswith("norm.weight") and "linear_attn" not in name:
            return decoded - 1
        if architecture == "qwen3next":
            return decoded.reshape(shape)
        return _grouped(decoded, name, config).reshape(shape)
    if kind in ("granitemoehybrid", "nemotron_h") and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        split = decoded.reshape(heads, len(decoded) // heads // 2, 2, *decoded.shape[1:])
        decoded = split.transpose(1, 2).reshape(decoded.shape)
    return decoded.reshape(shape)


def _grouped(decoded: torch.Tensor, name: str, config: Any) -> torch.Tensor:
    """Put value heads that are stored as [heads of a key, keys] into transformers' order, [keys, heads of a key]."""
    keys, heads, dim = (
        config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    )  # fmt: skip

    def turned(values: torch.Tensor) -> torch.Tensor:
        split = values.reshape(heads // keys, keys, len(values) // heads, *values.shape[1:])
        return split.transpose(0, 1).reshape(values.shape)

    if name.endswith("linear_attn.out_proj.weight"):
        return turned(decoded.t()).t()
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        first = len(decoded) - heads * dim
        return torch.cat([decoded[:first], turned(decoded[first:])])
    is_of_values = ("A_log", "ssm_dt.bias", "in_proj_a.weight", "in_proj_b.weight", "in_proj_z.weight")
    return turned(decoded) if name.endswith(is_of_values) else decoded


def small_values(stored_name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray | None:
    """Return values of a tensor that must have a sign or size; None: any will do."""
    if stored_name.endswith("ssm_a"):
        return -random.uniform(0.05, 2.0, shape).astype(np.float32)
    if stored_name.endswith(("ssm_d", "ssm_dt.bias", "exp_probs_b.bias")):
        return random.uniform(-0.5, 0.5, shape).astype(np.float32)
    if "norm" in stored_name:
        return random.uniform(0.5, 1.5, shape).astype(np.float32)
    if stored_name.endswith(("ssm_conv1d.weight", "shortconv.conv.weight")):
        return random.normal(0, 0.3, shape).astype(np.float32)
    return None


# --- metadata --------------------------------------------------------------------------------------------------------


def add_metadata(writer: Any, architecture: str, config: Any) -> None:
    """Write what the converter writes of such a model."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    eps = next(
        getattr(config, name) for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if hasattr(config, name)
    )
    writer.add_layer_norm_rms_eps(eps)
    if architecture == "mamba2":
        writer.add_context_length(2**20)
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
    else:
        _add_attention(writer, architecture, config)
    if architecture == "lfm2":
        writer.add_vocab_size(config.vocab_size)
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        _add_ssm(writer, config)
    if architecture == "granitehybrid":
        writer.add_rope_scaling_finetuned(False)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if experts := getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture == "nemotron_h_moe":
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_moe_latent_size(config.moe_latent_size)
    if architecture in ("qwen35moe", "qwen3next"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _add_attention(writer: Any, architecture: str, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    kinds, heads = getattr(config, "layer_types", None), config.num_key_value_heads
    if architecture in ("qwen35", "qwen35moe", "qwen3next", "falcon-h1"):
        writer.add_head_count_kv(heads)
    else:
        writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in kinds])
    if architecture.startswith("nemotron_h"):
        width = config.moe_intermediate_size if architecture == "nemotron_h_moe" else config.intermediate_size
        writer.add_feed_forward_length([width if kind in ("mlp", "moe") else 0 for kind in kinds])
    elif architecture not in ("qwen35moe", "qwen3next"):
        writer.add_feed_forward_length(config.intermediate_size)
    if rope := getattr(config, "rope_parameters", None):
        writer.add_rope_freq_base(rope["rope_theta"])
    if architecture.startswith("qwen"):
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
        writer.add_full_attention_interval(2)


def _add_ssm(writer: Any, config: Any) -> None:
    if hasattr(config, "linear_num_value_heads"):
        heads, dim = config.linear_num_value_heads, config.linear_value_head_dim
        groups, state, width = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_conv_kernel_dim
    elif hasattr(config, "mamba_n_heads"):
        heads, dim, groups = config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups
        state, width = config.mamba_d_state, config.mamba_d_conv
    else:
        is_nemotron = hasattr(config, "mamba_num_heads")
        heads = config.mamba_num_heads if is_nemotron else config.num_heads
        dim = config.mamba_head_dim if is_nemotron else config.head_dim
        groups, width = config.n_groups, config.conv_kernel
        state = config.ssm_state_size if is_nemotron else config.state_size
    writer.add_ssm_conv_kernel(width)
    writer.add_ssm_inner_size(heads * dim)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)
