"""Tiny random checkpoints of every family, as Hugging Face would save them: the oracle's models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 384
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


CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(path: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Save a byte-level BPE tokenizer of at most VOCAB_SIZE ids, with a few merges and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cache holds the keys and the values of every token"] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    if chat_template is not None:
        fast.chat_template = chat_template
    fast.save_pretrained(path)


def save_byte_fallback_tokenizer(path: Path) -> None:
    """Save a BPE tokenizer as Llama 2 has it: a character that is not a token becomes one token for each byte."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcde"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(path)
