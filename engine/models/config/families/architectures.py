"""Architectures that our own decoder or the adapter serves; others are refused, with the reason.

An architecture is in PROVEN because tests/engine/models/adapter compares its answers with transformers' own. That
nothing crashes proves nothing: a model with recurrent layers runs, and its answers are wrong from the second step on.
"""

from __future__ import annotations

from engine.errors import ModelLoadError
from engine.models.config.families.refused import reason_of
from engine.models.config.families.table import ARCHITECTURES

__all__ = [
    "ALIASES",
    "MODEL_TYPES",
    "PROVEN",
    "TENSOR_PARALLEL",
    "WITH_SINKS",
    "WITH_VALUE_DIMS",
    "require_proven",
    "require_served",
]

PROVEN = frozenset(
    {
        "AfmoeForCausalLM",
        "ApertusForCausalLM",
        "ArceeForCausalLM",
        "AriaTextForCausalLM",
        "BeamForCausalLM",
        "BioGptForCausalLM",
        "BitNetForCausalLM",
        "CTRLLMHeadModel",
        "Cohere2ForCausalLM",
        "Cohere2MoeForCausalLM",
        "CohereForCausalLM",
        "CwmForCausalLM",
        "DbrxForCausalLM",
        "DiffLlamaForCausalLM",
        "Dots1ForCausalLM",
        "Ernie4_5ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Exaone4ForCausalLM",
        "ExaoneMoeForCausalLM",
        "FlexOlmoForCausalLM",
        "FlintForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "GPTNeoXForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3nForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "GlmForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "GraniteSWAForCausalLM",
        "HYV3ForCausalLM",
        "HeliumForCausalLM",
        "HrmTextForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "HyperCLOVAXForCausalLM",
        "Jais2ForCausalLM",
        "JetMoeForCausalLM",
        "Kolibri1ForCausalLM",
        "LagunaForCausalLM",
        "LlamaForCausalLM",
        "MellumForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Ministral3ForCausalLM",
        "MinistralForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "ModernBertDecoderForCausalLM",
        "NanoChatForCausalLM",
        "NemotronForCausalLM",
        "OPTForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoForCausalLM",
        "OlmoeForCausalLM",
        "PersimmonForCausalLM",
        "Phi3ForCausalLM",
        "PhiForCausalLM",
        "PhimoeForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "SolarOpenForCausalLM",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
        "VaultGemmaForCausalLM",
    }
)

# Names in published checkpoints, and transformers' names of the same architectures.
ALIASES = {
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "Qwen2_5OmniModel": "Qwen2_5OmniForConditionalGeneration",
}

# Model types in published checkpoints whose code is their own, and transformers' of the models that compute the same.
MODEL_TYPES = {"kimi_k2": "deepseek_v3"}

# Architectures whose attention layers have sinks.
WITH_SINKS = frozenset(
    {
        "FlintForCausalLM",
        "GptOssForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "GraniteSWAForCausalLM",
        "MiMoV2FlashForCausalLM",
    }
)

# Architectures whose keys and values have heads of different sizes.
WITH_VALUE_DIMS = frozenset({"MiMoV2FlashForCausalLM"})

# Architectures that tensor-parallel ranks do not share: adapter/parallel.py cannot divide transformers' modules.
_ONE_RANK = frozenset(
    {
        "AriaTextForCausalLM",
        "BeamForCausalLM",
        "BioGptForCausalLM",
        "BitNetForCausalLM",
        "CTRLLMHeadModel",
        "CohereForCausalLM",
        "DbrxForCausalLM",
        "DiffLlamaForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "Gemma3nForCausalLM",  # a feed-forward computes with the mean of all its features
        "Glm4ForCausalLM",
        "GlmForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "GraniteSWAForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "JetMoeForCausalLM",
        "MiMoV2FlashForCausalLM",
        "ModernBertDecoderForCausalLM",
        "OPTForCausalLM",
        "PersimmonForCausalLM",
        "Phi3ForCausalLM",
        "StableLmForCausalLM",
    }
)
TENSOR_PARALLEL = PROVEN - _ONE_RANK

_SEE = "docs/models.md lists what is served"
_CONVERTED = "give the version for transformers' own classes, whose name ends with -hf"
_REMEDIES = dict.fromkeys(("LlavaLlamaForCausalLM", "LlavaMistralForCausalLM", "LlavaQwenForCausalLM"), _CONVERTED)


def require_served(architecture: str) -> str:
    """Return transformers' name of an architecture; raise ModelLoadError, with the reason, unless it is served."""
    return architecture if architecture in ARCHITECTURES else require_proven(architecture)


def require_proven(architecture: str) -> str:
    """Return the name as ``require_served`` does; raise ModelLoadError unless transformers' modules may compute it."""
    name = ALIASES.get(architecture, architecture)
    if name not in PROVEN and name in ARCHITECTURES:
        raise ModelLoadError(
            f"architecture '{name}' is computed by our own decoder alone: no test has compared transformers' modules "
            "on our KV cache; set model_impl to auto"
        )
    if name not in PROVEN:
        remedy = _REMEDIES.get(name, _SEE)
        raise ModelLoadError(f"architecture '{architecture}' is not supported: {reason_of(name)}; {remedy}")
    return name
