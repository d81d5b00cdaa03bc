"""text_tensors: the tensors of a multimodal checkpoint's text part, by the names that a model of text has for them.

language_model.model.layers.0...    language_model.lm_head.weight    Gemma 3, Mistral 3, Llava
model.language_model.layers.0...    lm_head.weight                   Qwen3-VL, and what transformers saves
model.text_model.layers.0...        lm_head.weight                   Idefics 3, SmolVLM
thinker.model.layers.0...           thinker.lm_head.weight           Qwen2.5-Omni, Qwen3-Omni: beside talker.*
model.layers.0...                   lm_head.weight                   Qwen2-VL, Qwen2.5-VL: beside visual.*
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.errors import ModelLoadError
from engine.models.checkpoint.composed_weight import Entry, turned
from engine.models.checkpoint.files.safetensors_header import StoredTensor
from engine.models.config.families.architectures import ALIASES
from engine.models.config.files.own_code import own_code_of
from engine.models.config.files.text_parts import MULTIMODAL

__all__ = ["architecture_of", "text_tensors", "with_experts_turned"]

_RENAMED = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("thinker.model.", "model."),
    ("thinker.lm_head.", "lm_head."),
)
# What is not text. A list, so that the weights of another model are refused and not ignored.
_DROPPED = re.compile(
    r"(model\.)?(aligner|audio_tower|connector|embed_audio|embed_vision|merger|mm_projector|multi_modal_projector|patch_merger|"
    r"projector|vision_embedder|vision_encoder|vision_model|vision_projection|vision_tower|visual|visual_embeddings_table)\.|"
    r"(model\.)?image_newline$|mtp\.|thinker\.(audio_tower|visual)\.|talker\.|code2wav\.|token2wav\."
)
_MTP = re.compile(r"(model\.)?mtp(_layers)?\.")
# Qwen3-VL's experts are turned in some checkpoints, Llama 4's wherever a tensor holds all of a layer.
_WITH_TURNED_EXPERTS = ("Qwen3VLMoeForConditionalGeneration", "Llama4ForCausalLM", "Llama4ForConditionalGeneration")
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def text_tensors(
    raw: Mapping[str, Any], stored: dict[str, StoredTensor], *, has_mtp: bool = False
) -> dict[str, StoredTensor]:
    """Return the tensors of the text part, renamed; all tensors if the architecture is not multimodal.

    Args:
        raw: the fields of config.json.
        stored: where each tensor is stored, by the name that the files have for it.
        has_mtp: whether layers of multi-token prediction are kept; else they are dropped with what is not text.

    Raises:
        ModelLoadError: if two tensors have the same name after they are renamed.
    """
    if (own := own_code_of(raw)) is not None:
        new_name = own.new_name
    elif architecture_of(raw) in MULTIMODAL:
        new_name = _new_name
    else:
        return stored
    text: dict[str, StoredTensor] = {}
    origins: dict[str, str] = {}
    for name, tensor in stored.items():
        new = name if has_mtp and _MTP.match(name) else new_name(name)
        if new is None:
            continue
        if new in text:
            raise ModelLoadError(
                f"'{origins[new]}' of '{text[new].path}' and '{name}' of '{tensor.path}' are both '{new}' of the text "
                "part; download the checkpoint again"
            )
        text[new], origins[new] = tensor, name
    return text


def _new_name(name: str) -> str | None:
    """Return the name that a model of text has for a weight; None if it is not of text."""
    if _DROPPED.match(name):
        return None
    return next((to + name.removeprefix(prefix) for prefix, to in _RENAMED if name.startswith(prefix)), name)


def with_experts_turned(architecture: str | None, weights: dict[str, Entry]) -> dict[str, Entry]:
    """Return the weights of a text part, with the stacked experts of some models as [num_experts, outputs, inputs].

    transformers saves Qwen3-VL's so; they are published as [num_experts, inputs, outputs], as Llama 4's always are. The
    shapes of a layer's two weights tell them apart:

                     [inputs, outputs]                    [outputs, inputs]
        gate_up_proj [hidden_size, 2 * intermediate]      [2 * intermediate, hidden_size]
        down_proj    [intermediate, hidden_size]          [hidden_size, intermediate]
    """
    if architecture not in _WITH_TURNED_EXPERTS:
        return weights
    result = dict(weights)
    for name, gate_up in weights.items():
        down_name = name.removesuffix(_GATE_UP) + _DOWN
        if not name.endswith(_GATE_UP) or down_name not in weights:
            continue
        down = weights[down_name]
        if len(gate_up.shape) != 3 or len(down.shape) != 3:
            continue
        if gate_up.shape[1] == down.shape[2] and gate_up.shape[2] == 2 * down.shape[1]:
            result[name], result[down_name] = turned(gate_up), turned(down)
    return result


def architecture_of(raw: Mapping[str, Any]) -> str | None:
    """Return transformers' name of the architecture in a config.json; None without one."""
    match raw.get("architectures"):
        case [str(name), *_]:
            return ALIASES.get(name, name)
    return None
