"""Tiny random checkpoints of every family, as Hugging Face would save them: the oracle's models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.engine.tiny_tokenizers import VOCAB_SIZE

EOS_TOKEN_ID = 2

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}

# Between them the four cover: QK norm, QKV bias, every kind of RoPE scaling, a head_dim that is not hidden / heads,
# tied and separate embeddings, full attention, a sliding window in all layers and in the upper ones only.
FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32, "tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1, "tie_word_embeddings": False},
    ),
    "llama": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 40, "head_dim": 16}),
}

# Between them the three cover: probabilities that are normalised or not, a shared expert, dense layers between sparse
# ones by either key, a sliding window, and both names of a block in a checkpoint.
EXPERT_FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 56,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
    ),
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        {"sliding_window": 40, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


def build_model(family: str, **overrides: Any) -> PreTrainedModel:
    """Return a seeded random model whose logits are far enough apart that greedy decoding has no ties."""
    config_class, model_class, extra = (FAMILIES | EXPERT_FAMILIES)[family]
    torch.manual_seed(0)
    config = config_class(**(_SHAPE | extra | overrides), architectures=[model_class.__name__])
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than the usual initialisation, or attention would be flat and its mistakes invisible; biases are
            # zero by default, so give them values too.
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "bias" in name:
                parameter.normal_(0.0, 0.3)
            else:
                parameter.mul_(8.0)
    return model


def save_checkpoint(model: PreTrainedModel, path: Path, **options: Any) -> str:
    """Save ``model`` as safetensors and return the path as text."""
    model.save_pretrained(path, **options)
    return str(path)
