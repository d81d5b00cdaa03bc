"""What llama.cpp's converter does to models of Gemma 4: tensors, names and metadata."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["ARCHITECTURES", "add_metadata", "rope_factors", "small_values", "tensors"]

_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA4: dict[str, Any] = {
    "global_head_dim": 128,
    "sliding_window": 9,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
}
_DENSE = _GEMMA4 | {
    "num_hidden_layers": 3,
    "layer_types": [_SLIDING, _SLIDING, _FULL],
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "rope_parameters": {
        _FULL: {"rope_type": "proportional", "rope_theta": 2e6, "partial_rotary_factor": 0.5},
        _SLIDING: {"rope_type": "default", "rope_theta": 2e4},
    },
}
_SHARING = _GEMMA4 | {
    "num_hidden_layers": 4,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 200,
}

# As those of converted.py.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma4": ("gemma4", "gemma4_text", _DENSE),
    "gemma4-moe": (
        "gemma4",
        "gemma4_text",
        _DENSE | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 256},
    ),
    "gemma4-e2b": ("gemma4", "gemma4_text", _SHARING | {"use_double_wide_mlp": True, "num_key_value_heads": 1}),
    "gemma4-e4b": ("gemma4", "gemma4_text", _SHARING),
}
_ROUTER = re.compile(r"model\.layers\.(\d+)\.router\.(scale|per_expert_scale)")


def tensors(model: Any) -> Iterator[tuple[str, tuple[int, ...], list[torch.Tensor]]]:
    """Yield the converter's tensors: the name that its tables know, their shape, and where the model has the values."""
    stored = [(name, values) for name, values in model.named_buffers() if name.endswith("layer_scalar")]
    for name, values in (*model.named_parameters(), *stored):
        if (router := _ROUTER.fullmatch(name)) is not None:
            module = "ffn_gate_inp" if router[2] == "scale" else "ffn_down_exps"
            name = f"blk.{router[1]}.{module}.scale"
        elif not name.endswith(".weight"):
            name += ".weight"
        yield name, tuple(values.shape), [values.data]


def small_values(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray | None:
    """Return numbers around 1 for the model's vectors, all of which are factors; None for matrices."""
    return random.uniform(0.5, 1.5, shape).astype(np.float32) if len(shape) == 1 else None


def rope_factors(config: Any) -> list[float]:
    """Return what divides the frequencies of full attention: the elements that are not rotated nearly stand still."""
    rope, half = config.rope_parameters[_FULL], _of_kind(config, _FULL).head_dim // 2
    num_rotated = int(half * rope["partial_rotary_factor"])
    return [1.0] * num_rotated + [1e30] * (half - num_rotated)


def _of_kind(config: Any, kind: str) -> Any:
    """Return the config of the layers of a kind."""
    return config.per_layer_config[config.layer_types.index(kind)]


def add_metadata(writer: Any, config: Any) -> None:
    """Add the keys of the architecture."""
    slides = [kind == _SLIDING for kind in config.layer_types]
    full, sliding = _of_kind(config, _FULL), _of_kind(config, _SLIDING)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters[_FULL]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters[_SLIDING]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    writer.add_rope_dimension_count(full.head_dim)
    writer.add_key_length_swa(sliding.head_dim)
    writer.add_value_length_swa(sliding.head_dim)
    writer.add_rope_dimension_count_swa(sliding.head_dim)
    width, first_shared = config.intermediate_size, config.num_hidden_layers - config.num_kv_shared_layers
    wide = [width * (1 + (layer >= first_shared)) for layer in range(config.num_hidden_layers)]
    writer.add_feed_forward_length(wide if config.use_double_wide_mlp else width)
    each = [(sliding if is_sliding else full).num_key_value_heads for is_sliding in slides]
    writer.add_head_count_kv(each if config.attention_k_eq_v else sliding.num_key_value_heads)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
