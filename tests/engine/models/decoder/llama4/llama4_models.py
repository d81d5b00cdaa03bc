"""Tiny models of Llama 4's kinds, random enough for every feature of a kind to matter.

The keys name the published models whose features they have. Chunks and the length by which queries grow are short, so
that contexts are several of them long.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig, PreTrainedModel

from tests.engine.checkpoints import EOS_TOKEN_ID, save_checkpoint

CHUNK = 8
_SHAPE: dict[str, Any] = {
    "vocab_size": 385,  # divided by neither 2 nor 4
    "hidden_size": 64,
    "intermediate_size": 48,
    "intermediate_size_mlp": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "attention_chunk_size": CHUNK,
    "floor_scale": 4,
    "attn_scale": 0.2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.4,
}

LLAMA4_MODELS: dict[str, dict[str, Any]] = {
    "llama-4-scout": {"use_qk_norm": True, "rope_parameters": _LLAMA3_ROPE},
    "llama-4-maverick": {"use_qk_norm": False, "interleave_moe_layer_step": 2},
    # What the config class allows, and no published model has.
    "other fields": {
        "num_experts_per_tok": 2,
        "attention_chunk_size": 6,  # chunks begin within blocks
        "no_rope_layers": [0, 1, 1, 0],
        "moe_layers": [0, 3],
        "attention_bias": True,
        "attn_temperature_tuning": False,
        "tie_word_embeddings": True,
    },
}
EXTENDED: dict[str, dict[str, Any]] = {  # by YaRN, whose factor the norms remove in the first one
    "yarn": {"use_qk_norm": True, "rope_parameters": _YARN},
    "yarn without norms": {"use_qk_norm": False, "rope_parameters": _YARN},
}


def build_llama4_model(name: str, **changes: Any) -> PreTrainedModel:
    """Return a seeded random float32 model of transformers."""
    torch.manual_seed(0)
    model = Llama4ForCausalLM(Llama4TextConfig(**_SHAPE | (LLAMA4_MODELS | EXTENDED)[name] | changes)).eval()
    model.config.architectures = [type(model).__name__]
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif "bias" in parameter_name:
                parameter.normal_(0.0, 0.3)
            else:
                parameter.normal_(0.0, 0.15)
    return model


def save_llama4_model(name: str, path: Path, **changes: Any) -> tuple[PreTrainedModel, str]:
    """Return a model and the directory that it was saved to."""
    model = build_llama4_model(name, **changes)
    return model, save_checkpoint(model, path)
