"""Tiny models of the dense families that our own decoder computes beside those of checkpoints.py.

Their heads are of 16 elements, so that the C kernels compute them, and their weights are random enough for every
feature of a family to matter. The keys name the published models whose features they have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.engine.checkpoints import save_checkpoint
from tests.engine.models.adapter import tiny_models
from tests.engine.models.adapter.tiny_models import WINDOW

_SHAPE: dict[str, Any] = {
    "vocab_size": 385,  # divided by neither 2 nor 4
    "max_position_embeddings": 1024,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "short_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
    "long_factor": [7.0] * 6,
}
_LINEAR_IN_FULL_LAYERS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

_YARN_IN_FULL_LAYERS = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 8.0,
        "original_max_position_embeddings": 16,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}

DENSE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("SmolLM3ForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "smollm3-windows": (
        "SmolLM3ForCausalLM",
        {"use_sliding_window": True, "sliding_window": WINDOW, "tie_word_embeddings": False},
    ),
    "phi3": ("Phi3ForCausalLM", {}),
    "phi4": ("Phi3ForCausalLM", {"sliding_window": None}),
    "phi4-mini": (
        "Phi3ForCausalLM",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 1024}
        | {"sliding_window": None, "tie_word_embeddings": True},
    ),
    "granite": ("GraniteForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {"rope_parameters": _YARN_IN_FULL_LAYERS}),
    "glm": ("GlmForCausalLM", {"attention_bias": True}),
    "glm4": ("Glm4ForCausalLM", {"attention_bias": True}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", {"final_logit_softcapping": 4.0, "attn_logit_softcapping": 1.0}),
    "gemma3-4b": ("Gemma3ForCausalLM", {"rope_parameters": _LINEAR_IN_FULL_LAYERS, "attention_bias": True}),
}


def build_dense_model(name: str) -> PreTrainedModel:
    """Return a seeded random float32 model of transformers."""
    architecture, options = DENSE_FAMILIES[name]
    model = tiny_models.build_model(architecture, **_SHAPE | options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.5)  # wider than those of tiny_models.py: else attention would see one key only
    return model


def save_dense_model(name: str, path: Path) -> tuple[PreTrainedModel, str]:
    """Return a model and the directory under ``path`` that it was saved to."""
    model = build_dense_model(name)
    return model, save_checkpoint(model, path)
