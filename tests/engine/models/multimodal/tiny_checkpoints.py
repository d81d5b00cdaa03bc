"""Tiny random checkpoints of multimodal models, written as the real ones are published: fields, names and shards."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, PreTrainedModel

from tests.engine.models.adapter.tiny_models import VOCAB_SIZE, WINDOW

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_MISTRAL = _TEXT | {"model_type": "mistral", "head_dim": 16, "rope_theta": 1e5, "sliding_window": None}
_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.5,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": []}
_PLAIN_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
_SIGLIP = _PLAIN_VISION | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
_CLIP = _SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 8}
_PIXTRAL = _PLAIN_VISION | {"model_type": "pixtral", "head_dim": 8, "image_size": 28, "patch_size": 14}
_QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
_IMAGE_TOKENS = {"image_token_id": 110, "video_token_id": 111, "vision_start_token_id": 112, "vision_end_token_id": 113}


@dataclass(frozen=True)
class TinyMultimodal:
    """One published kind of checkpoint.

    Attributes:
        published: names of checkpoints of this kind.
        architecture, model_type: of the whole model.
        text: the fields of its text part.
        others: the other fields of config.json, with the towers.
        names: some of the tensors' names in the published files.
        vision_prefix: what published names of the vision tower begin with, where transformers has ``vision_tower.``.
        is_flat: the fields of the text part are at the top.
        experts_are_turned: stacked experts are stored as [num_experts, inputs, outputs].
    """

    published: str
    architecture: str
    model_type: str
    text: dict[str, Any]
    others: dict[str, Any]
    names: tuple[str, ...]
    vision_prefix: str = "vision_tower."
    is_flat: bool = False
    experts_are_turned: bool = False

    @property
    def text_type(self) -> str:
        """The model type of the text part."""
        return str(self.text.get("model_type", f"{self.model_type}_text"))

    @property
    def config_json(self) -> dict[str, Any]:
        """The fields of config.json."""
        fields = self.text if self.is_flat else {"text_config": self.text}
        return (
            {"architectures": [self.architecture], "model_type": self.model_type, "dtype": "float32"}
            | self.others
            | fields
        )

    def build(self) -> PreTrainedModel:
        """Return a seeded random float32 model whose attention, biases and norms all matter to its answers."""
        torch.manual_seed(0)
        config = CONFIG_MAPPING[self.model_type].from_dict(self.config_json)
        model: PreTrainedModel = getattr(transformers, self.architecture)(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 and name.endswith("weight"):  # a norm
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0.0, 0.2)
        return model


_LLAVA_NAMES = ("language_model.model.layers.0.self_attn.q_proj.weight", "language_model.model.embed_tokens.weight")
_LLAVA_NAMES += ("language_model.lm_head.weight", "multi_modal_projector.linear_1.weight")

TINY: dict[str, TinyMultimodal] = {
    "gemma3": TinyMultimodal(
        "gemma-3-4b-it, gemma-3-12b-it, gemma-3-27b-it, medgemma-4b-it",
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {key: value for key, value in _TEXT.items() if key != "max_position_embeddings"}
        | {"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": WINDOW}
        | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window_pattern": 2},
        {"vision_config": _SIGLIP | {"vision_use_head": False}, "mm_tokens_per_image": 4, "eos_token_id": [1, 106]}
        | {"boi_token_index": 117, "eoi_token_index": 118, "image_token_index": 119},
        (
            *("language_model.model.layers.0.self_attn.q_norm.weight", "language_model.model.embed_tokens.weight"),
            "vision_tower.vision_model.embeddings.patch_embedding.weight",
            "multi_modal_projector.mm_input_projection_weight",
        ),
        vision_prefix="vision_tower.vision_model.",
    ),
    "mistral3": TinyMultimodal(
        "Mistral-Small-3.1-24B-Instruct-2503, Mistral-Small-3.2-24B-Instruct-2506, Magistral-Small-2509",
        "Mistral3ForConditionalGeneration",
        "mistral3",
        _MISTRAL,
        {"vision_config": _PIXTRAL, "image_token_index": 10, "tie_word_embeddings": False, "spatial_merge_size": 2},
        (*_LLAVA_NAMES, "vision_tower.patch_conv.weight", "multi_modal_projector.patch_merger.merging_layer.weight"),
    ),
    "ministral3": TinyMultimodal(
        "Ministral-3-3B-Instruct-2512, Ministral-3-8B-Instruct-2512, Ministral-3-14B-Instruct-2512, Devstral-Small-2",
        "Mistral3ForConditionalGeneration",
        "mistral3",
        _TEXT | {"model_type": "ministral3", "head_dim": 16, "rope_parameters": _YARN, "sliding_window": None},
        {"vision_config": _PIXTRAL, "image_token_index": 10, "tie_word_embeddings": True, "spatial_merge_size": 2},
        ("language_model.model.layers.0.self_attn.q_proj.weight", "language_model.model.embed_tokens.weight"),
    ),
    "qwen2-vl": TinyMultimodal(
        "Qwen2-VL-2B-Instruct, Qwen2-VL-7B-Instruct, Qwen2-VL-72B-Instruct",
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        _TEXT
        | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e5, "rms_norm_eps": 1e-6}
        | {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 2},
        {"vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "in_chans": 3}}
        | {"eos_token_id": 2, "tie_word_embeddings": False, **_IMAGE_TOKENS},
        (
            "model.layers.0.self_attn.q_proj.bias",
            "model.embed_tokens.weight",
            "lm_head.weight",
            "visual.patch_embed.proj.weight",
        ),
        is_flat=True,
    ),
    "qwen2.5-vl": TinyMultimodal(
        "Qwen2.5-VL-3B-Instruct, Qwen2.5-VL-7B-Instruct, Qwen2.5-VL-32B-Instruct, Qwen2.5-VL-72B-Instruct",
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        _TEXT
        | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e5, "rms_norm_eps": 1e-6}
        | {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 2},
        {"vision_config": _QWEN_VISION | {"model_type": "qwen2_5_vl", "fullatt_block_indexes": [0]}}
        | {"eos_token_id": 2, "tie_word_embeddings": True, **_IMAGE_TOKENS},
        ("model.layers.0.self_attn.q_proj.bias", "model.embed_tokens.weight", "visual.blocks.0.attn.qkv.weight"),
        is_flat=True,
    ),
    "qwen3-vl": TinyMultimodal(
        "Qwen3-VL-2B-Instruct, Qwen3-VL-4B-Instruct, Qwen3-VL-8B-Instruct, Qwen3-VL-32B-Instruct",
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        _TEXT
        | {"model_type": "qwen3_vl_text", "head_dim": 16, "eos_token_id": 2, "rope_theta": 1e5}
        | {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}},
        {"vision_config": _QWEN_VISION | {"model_type": "qwen3_vl", "deepstack_visual_indexes": [0]}}
        | {"tie_word_embeddings": False, **_IMAGE_TOKENS},
        ("model.language_model.layers.0.self_attn.q_norm.weight", "lm_head.weight", "model.visual.pos_embed.weight"),
    ),
    "qwen3-vl-moe": TinyMultimodal(
        "Qwen3-VL-30B-A3B-Instruct, Qwen3-VL-235B-A22B-Instruct",
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        _TEXT
        | _EXPERTS
        | {"model_type": "qwen3_vl_moe_text", "head_dim": 16, "eos_token_id": 2, "rope_theta": 1e5}
        | {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}},
        {"vision_config": _QWEN_VISION | {"model_type": "qwen3_vl_moe", "deepstack_visual_indexes": [0]}}
        | {"tie_word_embeddings": False, **_IMAGE_TOKENS},
        ("model.language_model.layers.0.mlp.experts.gate_up_proj", "lm_head.weight", "model.visual.pos_embed.weight"),
        experts_are_turned=True,
    ),
    "llava": TinyMultimodal(
        "llava-1.5-7b-hf, llava-1.5-13b-hf",
        "LlavaForConditionalGeneration",
        "llava",
        _TEXT | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"vision_config": _CLIP, "image_token_index": 119, "tie_word_embeddings": False},
        (*_LLAVA_NAMES, "vision_tower.vision_model.embeddings.class_embedding"),
        vision_prefix="vision_tower.vision_model.",
    ),
    "pixtral": TinyMultimodal(
        "pixtral-12b",
        "LlavaForConditionalGeneration",
        "llava",
        _MISTRAL,
        {"vision_config": _PIXTRAL, "image_token_index": 10, "vision_feature_layer": -1, "tie_word_embeddings": False}
        | {"vision_feature_select_strategy": "full"},
        (*_LLAVA_NAMES, "vision_tower.patch_conv.weight"),
    ),
    "llava-qwen2": TinyMultimodal(
        "llava-interleave-qwen-7b-hf",
        "LlavaForConditionalGeneration",
        "llava",
        _TEXT | {"model_type": "qwen2", "rope_theta": 1e5},
        {"vision_config": _SIGLIP | {"vision_use_head": False}, "image_token_index": 119, "tie_word_embeddings": False},
        _LLAVA_NAMES,
    ),
}


@dataclass
class Saved:
    """A checkpoint, and what transformers reads from it."""

    path: Path
    model: PreTrainedModel
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # by their names in the files


def save(name: str, path: Path, *, as_published: bool = True) -> Saved:
    """Write a checkpoint in shards; as published, or with the names that transformers has for its own modules."""
    tiny = TINY[name]
    model = tiny.build()
    model.save_pretrained(path, max_shard_size="60KB", save_original_format=as_published)
    (path / "config.json").write_text(json.dumps(tiny.config_json))
    weights: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}
    for file in sorted(path.glob("*.safetensors")):
        stored = load_file(file)
        if as_published:
            stored = {_published(key, tiny): _turned(key, weight, tiny, model) for key, weight in stored.items()}
            save_file(stored, file, {"format": "pt"})
        weights |= stored
        files |= dict.fromkeys(stored, file.name)
    if (index := path / "model.safetensors.index.json").exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    if as_published:
        assert set(tiny.names) <= weights.keys(), sorted(weights)
    return Saved(path, getattr(transformers, tiny.architecture).from_pretrained(path, dtype=torch.float32), weights)


def _published(name: str, tiny: TinyMultimodal) -> str:
    """Return the published name of a tensor, given that in the files that transformers writes."""
    return re.sub(r"^vision_tower\.", tiny.vision_prefix, name)


def _turned(name: str, weight: torch.Tensor, tiny: TinyMultimodal, model: PreTrainedModel) -> torch.Tensor:
    """Return stacked experts as [num_experts, inputs, outputs] where they are published so."""
    if not tiny.experts_are_turned or ".experts." not in name:
        return weight
    own = model.get_parameter(name)
    return weight.mT.contiguous() if weight.shape == own.shape else weight
