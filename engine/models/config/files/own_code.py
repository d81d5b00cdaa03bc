"""as_known_text: the config.json of a checkpoint whose code is its own, as that of the model of text inside it.

Their code is never run. What it computes for tokens of text alone is what an architecture that is served computes, with
other names around it: InternVL3 is Qwen2 beside a tower, and MiMo is Qwen2 with layers that predict further tokens.
tests/engine/models/multimodal/test_own_code.py compares each row with transformers' class of the text part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelLoadError, shown
from engine.models.config.families.architectures import MODEL_TYPES

__all__ = ["OWN_CODE", "OwnCode", "as_known_text", "own_code_of"]


@dataclass(frozen=True, kw_only=True)
class OwnCode:
    """How an architecture of a checkpoint's own holds a model of text.

    Attributes:
        text_types: the model types that its text part may have, and the architectures that compute them.
        parts: fields that may hold the config of the text part, the first that is there; empty: its fields are at the
            top, and its model type is the only one of ``text_types``, or that of its ``version``.
        versions: values of the field ``version``, and the model type of each.
        renamed: beginnings of the weights' names, and what a model of text has instead.
        dropped: pattern of the names of weights that are not of text.
    """

    text_types: Mapping[str, str]
    parts: tuple[str, ...] = ()
    versions: Mapping[str, str] | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    dropped: str = ""

    def new_name(self, name: str) -> str | None:
        """Return the name that a model of text has for a weight; None if it is not of text."""
        if self.dropped and re.match(self.dropped, name):
            return None
        for prefix, to in self.renamed:
            if name.startswith(prefix):
                return to + name.removeprefix(prefix)
        return name.replace(".base_layer.", ".")  # beside adapters for other inputs, which are dropped


_QWEN2, _QWEN3 = {"qwen2": "Qwen2ForCausalLM"}, {"qwen3": "Qwen3ForCausalLM"}
_USUAL = _QWEN2 | _QWEN3 | {"llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
_LANGUAGE_MODEL, _LLM = (("language_model.", ""),), (("llm.", ""),)
_INTERNVL = OwnCode(
    text_types=_USUAL | {"gpt_oss": "GptOssForCausalLM"},
    parts=("llm_config", "text_config"),
    renamed=_LANGUAGE_MODEL,
    dropped=r"(vision_model|mlp1)\.",
)
_MINICPM = OwnCode(
    text_types=_QWEN2 | _QWEN3,
    versions={"2.6": "qwen2", "4.5": "qwen3"},
    renamed=_LLM,
    dropped=r"(vpm|resampler|apm|audio_\w+|tts|tts_\w+)\.",
)
_OVIS = OwnCode(text_types=_USUAL, parts=("llm_config",), renamed=_LLM, dropped=r"(visual_tokenizer|vte)\.")

OWN_CODE: dict[str, OwnCode] = {
    "DotsOCRForCausalLM": OwnCode(text_types=_QWEN2, dropped=r"vision_tower\."),
    "Eagle2_5_VLForConditionalGeneration": _INTERNVL,
    "InternS1ForConditionalGeneration": OwnCode(
        text_types=_USUAL,
        parts=("text_config",),
        renamed=(("model.language_model.", "model."),),
        dropped=r"model\.(vision_tower|multi_modal_projector)\.",
    ),
    "InternVLChatModel": _INTERNVL,
    "KimiVLForConditionalGeneration": OwnCode(
        text_types={"deepseek_v3": "DeepseekV3ForCausalLM"},
        parts=("text_config",),
        renamed=_LANGUAGE_MODEL,
        dropped=r"(vision_tower|multi_modal_projector)\.",
    ),
    "Llama_Nemotron_Nano_VL": _INTERNVL,
    "MiMoForCausalLM": OwnCode(text_types=_QWEN2, dropped=r"model\.mtp_layers\."),
    "MiniCPMO": _MINICPM,
    "MiniCPMV": _MINICPM,
    "NemotronH_Nano_VL_V2": OwnCode(
        text_types={"nemotron_h": "NemotronHForCausalLM"},
        parts=("llm_config", "text_config"),
        renamed=_LANGUAGE_MODEL,
        dropped=r"(vision_model|mlp1|sound_encoder|sound_projection)\.",
    ),
    "Ovis": _OVIS,
    "Ovis2_5": _OVIS,
    "Phi3VForCausalLM": OwnCode(
        text_types={"phi3": "Phi3ForCausalLM"}, dropped=r"model\.vision_embed_tokens\.|img_processor\."
    ),
    "Phi4MMForCausalLM": OwnCode(
        text_types={"phi3": "Phi3ForCausalLM"}, dropped=r"model\.embed_tokens_extend\.|.*\.lora_[AB]\.(vision|speech)\."
    ),
    "SkyworkR1VChatModel": _INTERNVL,
}

# Fields of the whole model that hold for its text part, unless this has them.
_OF_THE_WHOLE = ("dtype", "torch_dtype", "quantization_config", "compression_config", "transformers_weights")
_NOT_KEPT = frozenset({"auto_map", "_name_or_path", "transformers_version", "version"})


def own_code_of(raw: Mapping[str, Any]) -> OwnCode | None:
    """Return the row of a config.json's architecture; None for others."""
    match raw.get("architectures"):
        case [str(name), *_]:
            return OWN_CODE.get(name)
    return None


def as_known_text(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json as those of the model of text inside it; others are returned as they are.

    Raises:
        ModelLoadError: if the text part is one that is not served.
    """
    own = own_code_of(raw)
    if own is None:
        return raw
    name = raw["architectures"][0]
    field = next((field for field in own.parts if isinstance(raw.get(field), dict)), None)
    if own.parts and field is None:
        raise ModelLoadError(
            f"config.json of '{name}' has no {' and no '.join(own.parts)}, which describes its text part; "
            "download it again"
        )
    part = raw if field is None else raw[field]
    where, model_type = _text_type(raw, own, field)
    if model_type not in own.text_types:
        raise ModelLoadError(
            f"architecture '{name}' is not supported with {where}={shown(raw.get(where, part.get('model_type')))}: no "
            f"test has compared it with transformers; supported: {', '.join(own.versions or own.text_types)}; "
            "docs/models.md lists what is served"
        )
    whole = {key: raw[key] for key in _OF_THE_WHOLE if key in raw}
    fields = {key: value for key, value in (whole | part).items() if key not in _NOT_KEPT}
    return fields | {"architectures": [own.text_types[model_type]], "model_type": model_type}


def _text_type(raw: Mapping[str, Any], own: OwnCode, field: str | None) -> tuple[str, Any]:
    """Return which field decides about the model type of the text part, and this type."""
    if field is not None:
        model_type = raw[field].get("model_type")
        known = MODEL_TYPES.get(model_type, model_type) if isinstance(model_type, str) else None
        return f"{field}.model_type", known
    if own.versions is not None:
        return "version", own.versions.get(str(raw.get("version")))
    return "model_type", next(iter(own.text_types))
