"""Tiny random embedding models and rerankers, with the files that sentence-transformers would save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    NomicBertConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from tests.engine.tiny_tokenizers import save_tokenizer

SENTENCE = "the cache holds keys and values of every token a query finds blocks in memory yes no what is paged"
WORDS = SENTENCE.split()
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCAB_SIZE = 384
HIDDEN = 64
MAX_LEN = 128

_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": MAX_LEN,
    "pad_token_id": 0,
}
_DECODER: dict[str, Any] = _ENCODER | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}

FAMILIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "bert": (BertConfig, _ENCODER),
    "roberta": (RobertaConfig, _ENCODER | {"pad_token_id": 1, "max_position_embeddings": MAX_LEN + 2}),
    "xlm_roberta": (XLMRobertaConfig, _ENCODER | {"pad_token_id": 1, "max_position_embeddings": MAX_LEN + 2}),
    "modernbert": (ModernBertConfig, _ENCODER | {"local_attention": 16, "global_attn_every_n_layers": 2}),
    "nomic_bert": (NomicBertConfig, _ENCODER),
    "qwen3": (Qwen3Config, _DECODER | {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, _DECODER | {"tie_word_embeddings": False}),
    "mistral": (MistralConfig, _DECODER | {"sliding_window": 24}),
    "llama": (LlamaConfig, _DECODER),
}
ENCODERS = ("bert", "roberta", "xlm_roberta", "modernbert", "nomic_bert")
CLASSIFIERS = ("bert", "roberta", "xlm_roberta", "modernbert")


def save_model(path: Path, family: str, kind: Any = AutoModel, **overrides: Any) -> Path:
    """Save a random model of a family with a tokenizer; return the directory."""
    config_class, shape = FAMILIES[family]
    torch.manual_seed(len(family))
    model = kind.from_config(config_class(**(shape | overrides)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Larger than the usual initialisation, or attention would be flat and its mistakes invisible.
            if "norm" not in name.lower():
                weight.normal_(0.0, 0.12)
    model.save_pretrained(path)
    if family in ENCODERS:
        save_encoder_tokenizer(path)
    else:
        save_tokenizer(path)
    return path


def save_causal_model(path: Path, family: str, **overrides: Any) -> Path:
    """Save a random language model."""
    return save_model(path, family, AutoModelForCausalLM, **overrides)


def save_classifier(path: Path, family: str, num_labels: int = 1, **overrides: Any) -> Path:
    """Save a random classifier of a family: with one label a reranker."""
    return save_model(path, family, AutoModelForSequenceClassification, num_labels=num_labels, **overrides)


def save_encoder_tokenizer(path: Path, *, has_token_types: bool = True) -> None:
    """Save a tokenizer of words and characters; with token types it marks the two texts of a pair, as BERT's does."""
    characters = [chr(code) for code in range(33, 127) if chr(code) not in WORDS]
    tokens = [*SPECIAL, *WORDS, *characters]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ids = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", *(["token_type_ids"] if has_token_types else []), "attention_mask"],
    )
    fast.save_pretrained(path)


def save_sentence_files(
    path: Path,
    pooling: str,
    *,
    normalize: bool = True,
    dense: int | None = None,
    max_tokens: int | None = None,
    prompts: dict[str, str] | None = None,
    default_prompt: str | None = None,
) -> None:
    """Save modules.json and the files that it names, as sentence-transformers does."""
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalize else [])]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    write_json(path / "modules.json", modules)
    write_json(
        path / "1_Pooling" / "config.json", {"word_embedding_dimension": HIDDEN, f"pooling_mode_{pooling}": True}
    )
    if dense:
        from safetensors.torch import save_file

        activation = "torch.nn.modules.activation.Tanh"
        described = {"in_features": HIDDEN, "out_features": dense, "bias": True, "activation_function": activation}
        write_json(path / "2_Dense" / "config.json", described)
        weights = {"linear.weight": torch.randn(dense, HIDDEN), "linear.bias": torch.randn(dense)}
        save_file(weights, str(path / "2_Dense" / "model.safetensors"))
    if max_tokens:
        write_json(path / "sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False})
    if prompts:
        named = {"prompts": prompts, "default_prompt_name": default_prompt}
        write_json(path / "config_sentence_transformers.json", named)


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file, and its directory."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))
