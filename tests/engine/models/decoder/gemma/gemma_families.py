"""Tiny models of the kinds of Gemma 3n and 4, random enough for every feature of a kind to matter.

The keys name the published models whose features they have. Full-attention layers have wider heads than others, and
the windows are short, so that contexts are several of them long.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.engine.checkpoints import EOS_TOKEN_ID, save_checkpoint
from tests.engine.models.adapter.tiny_models import WINDOW

_SHAPE: dict[str, Any] = {
    "vocab_size": 385,  # divided by neither 2 nor 4
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "max_position_embeddings": 1024,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}
_SCALES = ("scale", "per_expert_scale", "layer_scalar", "correct_output_scale")
_SLIDING, _FULL = "sliding_attention", "full_attention"
_DENSE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
}
_SHARING: dict[str, Any] = {
    "num_hidden_layers": 7,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 385,
}
_ALTUP: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL, _SLIDING],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 300,  # further ids have the embedding of id 0
    "intermediate_size": [96, 72, 96, 104, 96, 104],
    "activation_sparsity_pattern": [0.95, 0.8, 0.0, 0.3, 0.0, 0.0],
    "altup_num_inputs": 4,
    "laurel_rank": 8,
}

GEMMA_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-4-31b": ("gemma4_text", _DENSE),
    "gemma-4-26b-a4b": (
        "gemma4_text",
        _DENSE | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "gemma-4-e4b": ("gemma4_text", _SHARING | {"use_double_wide_mlp": True}),
    "gemma-4-e2b": ("gemma4_text", _SHARING | {"num_key_value_heads": 1, "global_head_dim": 16}),  # layers' heads alike
    "gemma-3n-e4b": ("gemma3n_text", _ALTUP),
    "gemma-4-12b": ("gemma4_unified_text", _DENSE | {"attention_k_eq_v": False, "tie_word_embeddings": False}),
}


def build_gemma_model(name: str, **changes: Any) -> PreTrainedModel:
    """Return a seeded random float32 model of transformers."""
    model_type, options = GEMMA_FAMILIES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **_SHAPE | options | changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    model.config.architectures = [type(model).__name__]
    with torch.no_grad():
        for parameter_name, parameter in (*model.named_parameters(), *model.named_buffers()):
            kind = parameter_name.rpartition(".")[2]
            if "q_norm" in parameter_name or "k_norm" in parameter_name:
                parameter.uniform_(0.3, 0.8)  # scores are not scaled: larger ones would double every rounding
            elif "norm" in parameter_name or kind in _SCALES:
                parameter.uniform_(0.5, 1.5)
            elif "altup." in parameter_name and kind == "weight":  # whose inputs are divided by the width
                parameter.normal_(0.0, 3.0 if "router" in parameter_name else 0.3)
            elif kind == "weight" or kind.endswith("proj"):
                parameter.normal_(0.0, 0.15)
    return model


def save_gemma_model(name: str, path: Path, **changes: Any) -> tuple[PreTrainedModel, str]:
    """Return a model and the directory under ``path`` that it was saved to.

    As published, layers that read the keys and values of others have weights for them, which nothing reads.
    """
    model = build_gemma_model(name, **changes)
    saved, count = save_checkpoint(model, path), model.config.num_hidden_layers
    weights, file = {}, path / "model.safetensors"
    for layer in range(count - model.config.num_kv_shared_layers, count):
        for module in ("k_proj", "v_proj", "k_norm"):
            weights[f"model.layers.{layer}.self_attn.{module}.weight"] = torch.full((3,), 7.0)
    if weights:
        save_file(load_file(file) | weights, file, {"format": "pt"})
    return model, saved
