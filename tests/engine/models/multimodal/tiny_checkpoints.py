"""Tiny random checkpoints of multimodal models, written as the real ones are published: fields, names and shards."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.engine.models.multimodal.other_kinds import OTHER_KINDS
from tests.engine.models.multimodal.published_kinds import PUBLISHED_KINDS
from tests.engine.models.multimodal.tiny_multimodal import TinyMultimodal

TINY = PUBLISHED_KINDS | OTHER_KINDS
# Kinds that other files compare: the names of checkpoints, and the types of the whole model and of its text part.
COMPARED_APART = {
    "gemma-3n-E2B-it, gemma-3n-E4B-it": ("Gemma3nForConditionalGeneration", "gemma3n_text"),
    "Qwen2.5-Omni-3B, Qwen2.5-Omni-7B": ("Qwen2_5OmniForConditionalGeneration", "qwen2_5_omni_text"),
    "Qwen3-Omni-30B-A3B-Instruct, Qwen3-Omni-30B-A3B-Thinking": (
        "Qwen3OmniMoeForConditionalGeneration",
        "qwen3_omni_moe_text",
    ),
}
# Every layout of names, experts, and states.
FEW = ("gemma3", "llama4", "ministral3", "qwen2.5-vl", "qwen3-vl-moe", "qwen3.5-moe", "smolvlm")
CASES = [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in TINY]  # few in `make test`


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
    whole = getattr(transformers, tiny.architecture).from_pretrained(path, dtype=torch.float32)
    return Saved(path, whole.get_submodule(tiny.generates_with), weights)


def _published(name: str, tiny: TinyMultimodal) -> str:
    """Return the published name of a tensor, given that in the files that transformers writes."""
    name = name.replace("language_model.model.blocks.", "language_model.model.layers.")  # blocks are of Kimi's tower
    return re.sub(r"^vision_tower\.", tiny.vision_prefix, name)


def _turned(name: str, weight: torch.Tensor, tiny: TinyMultimodal, model: PreTrainedModel) -> torch.Tensor:
    """Return stacked experts as [num_experts, inputs, outputs] where they are published so."""
    if not tiny.experts_are_turned or ".experts." not in name:
        return weight
    own = model.get_parameter(name)
    return weight.mT.contiguous() if weight.shape == own.shape else weight
