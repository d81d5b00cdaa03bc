"""The text part of multimodal checkpoints: the architecture that computes it, and its config.

A multimodal model is a decoder of text beside towers for images or sound. For tokens of text alone it computes what the
decoder computes, so the decoder is loaded and the towers are not. A row of MULTIMODAL is there because a test compares
its tokens with those of the multimodal class of transformers (tests/engine/models/multimodal/).
"""

from __future__ import annotations

import copy
from typing import Any

from engine.errors import ModelLoadError, shown
from engine.models.config.families.architectures import ALIASES, MODEL_TYPES

__all__ = ["MULTIMODAL", "TEXT_ARCHITECTURES", "text_config", "text_fields"]

_QWEN2, _QWEN3 = "qwen2", "qwen3"

# The model types that a text part may have; the first is that of a config that names none.
MULTIMODAL: dict[str, tuple[str, ...]] = {
    "AriaForConditionalGeneration": ("aria_text",),
    "AudioFlamingo3ForConditionalGeneration": (_QWEN2,),
    "AyaVisionForConditionalGeneration": ("cohere2",),
    "Cohere2VisionForConditionalGeneration": ("cohere2",),
    "DeepseekVLForConditionalGeneration": ("llama",),
    "Exaone4_5_ForConditionalGeneration": ("exaone4",),
    "Gemma3ForConditionalGeneration": ("gemma3_text",),
    "Gemma3nForConditionalGeneration": ("gemma3n_text",),
    "Gemma4ForConditionalGeneration": ("gemma4_text",),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified_text",),
    "Glm46VForConditionalGeneration": ("glm4v_text", "glm4v_moe_text"),
    "Glm4vForConditionalGeneration": ("glm4v_text",),
    "Glm4vMoeForConditionalGeneration": ("glm4v_moe_text",),
    "GlmAsrForConditionalGeneration": ("llama",),
    "GotOcr2ForConditionalGeneration": (_QWEN2,),
    "Idefics2ForConditionalGeneration": ("mistral",),
    "Idefics3ForConditionalGeneration": ("llama",),
    "InternVLForConditionalGeneration": (_QWEN2, _QWEN3, "qwen3_moe", "gpt_oss"),
    "Kimi_K25ForConditionalGeneration": ("deepseek_v3",),
    "LightOnOcrForConditionalGeneration": (_QWEN3,),
    "Lfm2VlForConditionalGeneration": ("lfm2",),
    "Llama4ForConditionalGeneration": ("llama4_text",),
    "LlavaForConditionalGeneration": ("llama", "mistral", _QWEN2),
    "LlavaNextForConditionalGeneration": ("llama", "mistral", _QWEN2, "granite"),
    "LlavaNextVideoForConditionalGeneration": ("llama",),
    "LlavaOnevisionForConditionalGeneration": (_QWEN2,),
    "MiniCPMV4_6ForConditionalGeneration": ("qwen3_5_text",),
    "Mistral3ForConditionalGeneration": ("mistral", "ministral3", "mistral4"),
    "Ovis2ForConditionalGeneration": (_QWEN2,),
    "Qwen2AudioForConditionalGeneration": (_QWEN2,),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_text",),
    "Qwen2_5OmniForConditionalGeneration": ("qwen2_5_omni_text",),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl_text",),
    "Qwen3OmniMoeForConditionalGeneration": ("qwen3_omni_moe_text",),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_text",),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe_text",),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5_text",),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe_text",),
    "SmolVLMForConditionalGeneration": ("llama",),
    "VideoLlama3ForConditionalGeneration": (_QWEN2,),
    "VipLlavaForConditionalGeneration": ("llama",),
    "VoxtralForConditionalGeneration": ("llama",),
}

# By the model type of a text part.
TEXT_ARCHITECTURES = {
    "aria_text": "AriaTextForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    _QWEN2: "Qwen2ForCausalLM",
    "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    _QWEN3: "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_omni_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}

# Model types that transformers has for text parts only, and those of the models that compute the same.
_SAME_AS = {
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "qwen2_5_omni_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": _QWEN3,
}
# What the class of a text part does, whatever its config says.
_FIXED: dict[str, dict[str, Any]] = {
    "glm4v_text": {"attention_bias": True},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}
_NOT_COPIED = frozenset({"_name_or_path", "architectures", "model_type", "quantization_config", "transformers_version"})
_THINKER = "thinker_config"  # of models that also speak: the part that writes text
_POSITIONS_OF_IMAGES = (
    "interleaved",
    "mrope_interleaved",
    "mrope_section",
)  # the three positions of a token of text are equal


def text_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json that describe its text part, and the architecture that computes that.

    Those of a model of text are returned as they are.

    Raises:
        ModelLoadError: if the text part is one that is not served, with the reason.
    """
    match raw.get("architectures"):
        case [str(published), *_] if (name := ALIASES.get(published, published)) in MULTIMODAL:
            thinker = raw.get(_THINKER)
            nested = (thinker if isinstance(thinker, dict) else raw).get("text_config")
            fields = nested if isinstance(nested, dict) else raw  # Qwen2-VL's are at the top
            model_type = nested.get("model_type") if isinstance(nested, dict) else None
            return fields | {"architectures": [_text_architecture(name, model_type or MULTIMODAL[name][0])]}
    return raw


def _text_architecture(name: str, model_type: Any) -> str:
    """Return the architecture of the text part of the multimodal architecture ``name``."""
    if isinstance(model_type, str):
        model_type = MODEL_TYPES.get(model_type, model_type)
    architecture = TEXT_ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if architecture is not None and model_type in MULTIMODAL[name]:
        return architecture
    raise ModelLoadError(
        f"architecture '{name}' is not supported with a text_config of the model_type {shown(model_type)}: no test has "
        f"compared it with transformers; supported: {', '.join(MULTIMODAL[name])}"
    )


def text_config(config: Any) -> Any:
    """Return the text part of a multimodal config of transformers as the config of a model of text.

    Any other config is returned as it is.

    Raises:
        ModelLoadError: if the text part is one that is not served.
    """
    published = (getattr(config, "architectures", None) or [None])[0]
    name = ALIASES.get(published, published)
    if name not in MULTIMODAL:
        return config
    part = config.get_text_config()
    architecture = _text_architecture(name, part.model_type)
    text = _own_config(part)
    text.architectures = [architecture]
    config = getattr(config, _THINKER, config)
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    if config.dtype is not None:  # also beside another one in the text part, as of LLaVA 1.6
        text.dtype = config.dtype
    if (eos := getattr(config, "eos_token_id", None)) is not None:
        text.eos_token_id = eos
    return text


def _own_config(part: Any) -> Any:
    """Return a copy of a text part's config, of the class that the model of text has."""
    model_type = _SAME_AS.get(part.model_type)
    if model_type is None:
        return copy.deepcopy(part)
    from transformers import CONFIG_MAPPING  # slow to import

    fields = {name: value for name, value in part.to_dict().items() if name not in _NOT_COPIED}
    rope = dict(fields.get("rope_parameters") or {})
    for name in _POSITIONS_OF_IMAGES:
        rope.pop(name, None)
    if rope.get("type") == "mrope":
        del rope["type"]  # beside a rope_type
    fields.setdefault("head_dim", part.hidden_size // part.num_attention_heads)  # not the default of the other class
    return CONFIG_MAPPING[model_type](**fields | {"rope_parameters": rope} | _FIXED.get(part.model_type, {}))
