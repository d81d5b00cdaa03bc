"""The table of docs/models.md that lists checkpoints by the names that they are published under."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.models.config.families.architectures import ALIASES, PROVEN, TENSOR_PARALLEL
from engine.models.config.families.refused import REFUSED, REFUSED_TEXT_PARTS
from engine.models.config.families.table import ARCHITECTURES
from engine.models.config.files.text_parts import TEXT_ARCHITECTURES
from tests.engine.models.config.test_refused_checkpoints import PUBLISHED as REFUSED_CHECKPOINTS
from tests.engine.models.gguf.converted import ARCHITECTURES as GGUF_MODELS
from tests.engine.models.multimodal.test_own_code import PUBLISHED as OWN_CODE
from tests.engine.models.multimodal.tiny_checkpoints import COMPARED_APART, TINY

# It is not known that there are GGUF files of these, or how they are written.
NOT_AS_GGUF = (
    *(
        "Kimi-VL",
        "MiMo-7B",
        "NVIDIA-Nemotron-Nano-12B-v2-VL",
        "Skywork-R1V",
        "Eagle2.5",
        "Intern-S1",
        "Ovis",
        "dots.ocr",
    ),
    *("Phi-3.5-vision", "Phi-4-multimodal", "Llama-3.1-Nemotron-Nano-VL"),
)

# Of models of text, by the architecture in their config.json.
TEXT_CHECKPOINTS = {
    "Qwen3ForCausalLM": "Qwen3-0.6B, Qwen3-1.7B, Qwen3-4B, Qwen3-4B-Instruct-2507, Qwen3-8B, Qwen3-14B, Qwen3-32B",
    "Qwen3MoeForCausalLM": "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-30B-A3B, Qwen3-Coder-480B-A35B",
    "Qwen2ForCausalLM": "Qwen2.5-0.5B to Qwen2.5-72B, Qwen2.5-Coder, QwQ-32B, DeepSeek-R1-Distill-Qwen-32B",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    "LlamaForCausalLM": "Llama-3.1-8B, Llama-3.1-70B, Llama-3.1-405B, Llama-3.2-1B, Llama-3.2-3B, Llama-3.3-70B",
    "MistralForCausalLM": "Mistral-7B-v0.3, Mistral-Nemo-Instruct-2407, Mistral-Small-24B-Instruct-2501",
    "MixtralForCausalLM": "Mixtral-8x7B-v0.1, Mixtral-8x22B-v0.1",
    "GptOssForCausalLM": "gpt-oss-20b, gpt-oss-120b",
    "Gemma2ForCausalLM": "gemma-2-2b-it, gemma-2-9b-it, gemma-2-27b-it",
    "Gemma3ForCausalLM": "gemma-3-270m-it, gemma-3-1b-it",
    "Phi3ForCausalLM": "Phi-3-mini, Phi-3.5-mini, Phi-4, Phi-4-mini, Phi-4-reasoning",
    "PhiMoEForCausalLM": "Phi-3.5-MoE",
    "Glm4ForCausalLM": "GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1-32B-0414",
    "Glm4MoeForCausalLM": "GLM-4.5-Air, GLM-4.5, GLM-4.6, GLM-4.7",
    "MiMoV2FlashForCausalLM": "MiMo-V2-Flash",
    "MiniMaxM2ForCausalLM": "MiniMax-M2, MiniMax-M2.5, MiniMax-M2.7",
    "SmolLM3ForCausalLM": "SmolLM3-3B",
    "GraniteForCausalLM": "granite-3.3-2b-instruct, granite-3.3-8b-instruct",
    "GraniteMoeForCausalLM": "granite-3.1-1b-a400m-instruct, granite-3.1-3b-a800m-instruct",
    "Olmo2ForCausalLM": "OLMo-2-1124-7B, OLMo-2-0325-32B",
    "Olmo3ForCausalLM": "Olmo-3-7B, Olmo-3-32B",
    "OlmoHybridForCausalLM": "Olmo-Hybrid-7B",
    "SeedOssForCausalLM": "Seed-OSS-36B-Instruct",
    "Cohere2ForCausalLM": "c4ai-command-r7b-12-2024, c4ai-command-a-03-2025",
    "Ernie4_5_MoeForCausalLM": "ERNIE-4.5-21B-A3B-PT, ERNIE-4.5-300B-A47B-PT",
    "HunYuanMoEV1ForCausalLM": "Hunyuan-A13B-Instruct",
    "Exaone4ForCausalLM": "EXAONE-4.0-1.2B, EXAONE-4.0-32B",
    "ApertusForCausalLM": "Apertus-8B-Instruct-2509, Apertus-70B-Instruct-2509",
    "Dots1ForCausalLM": "dots.llm1.inst",
    "ArceeForCausalLM": "AFM-4.5B",
    "Qwen3NextForCausalLM": "Qwen3-Next-80B-A3B-Instruct, Qwen3-Next-80B-A3B-Thinking, Qwen3-Coder-Next",
    "NemotronHForCausalLM": "NVIDIA-Nemotron-3-Nano-30B-A3B, NVIDIA-Nemotron-3-Super-120B-A12B, Nemotron-H-56B",
    "KimiLinearForCausalLM": "Kimi-Linear-48B-A3B-Base, Kimi-Linear-48B-A3B-Instruct",
    "GraniteMoeHybridForCausalLM": "granite-4.0-h-small, granite-4.0-h-tiny, granite-4.0-h-micro, granite-4.0-micro",
    "DeepseekV2ForCausalLM": "DeepSeek-V2, DeepSeek-V2-Lite, DeepSeek-Coder-V2-Lite-Instruct",
    "DeepseekV3ForCausalLM": "DeepSeek-V3, DeepSeek-R1, DeepSeek-V3.1, Kimi-K2-Instruct, Kimi-K2-Thinking",
    "DeepseekV32ForCausalLM": "DeepSeek-V3.2, DeepSeek-V3.2-Exp, DeepSeek-V3.2-Speciale",
    "GlmMoeDsaForCausalLM": "GLM-5, GLM-5.1, GLM-5.2",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
    "MiniCPM3ForCausalLM": "MiniCPM3-4B",
    "YoutuForCausalLM": "Youtu-LLM-2B",
    "Lfm2ForCausalLM": "LFM2-350M, LFM2-1.2B, LFM2-2.6B, LFM2.5-1.2B-Instruct",
    "Lfm2MoeForCausalLM": "LFM2-8B-A1B",
    "FalconH1ForCausalLM": "Falcon-H1-0.5B-Instruct, Falcon-H1-7B-Instruct, Falcon-H1-34B-Instruct",
    "BambaForCausalLM": "Bamba-9B-v2",
    "Mamba2ForCausalLM": "mamba2-2.7b-hf, Mamba-Codestral-7B-v0.1",
}


def by_name() -> str:
    """Return the rows, those that are served first."""
    rows = [_served(names, ALIASES.get(name, name)) for name, names in TEXT_CHECKPOINTS.items()]
    rows += [_served(tiny.published, TEXT_ARCHITECTURES[tiny.text_type], is_part=True) for tiny in TINY.values()]
    rows += [_served(names, TEXT_ARCHITECTURES[part], is_part=True) for names, (_, part) in COMPARED_APART.items()]
    rows += [_served(names, kind.part, is_part=True) for names, kind in OWN_CODE.items()]
    refused: dict[str, list[str]] = {}
    for name, (architecture, _, fields, _) in REFUSED_CHECKPOINTS.items():
        part = TEXT_ARCHITECTURES.get(fields.get("text_config", {}).get("model_type"), architecture)
        refused.setdefault(REFUSED[REFUSED_TEXT_PARTS.get(architecture, part)], []).append(name)
    rows += [f"| {', '.join(names)} | refused: {reason} | | |" for reason, names in refused.items()]
    return "\n".join(rows)


def _served(names: str, architecture: str, *, is_part: bool = False) -> str:
    assert architecture in PROVEN | ARCHITECTURES.keys(), architecture
    is_own = architecture in ARCHITECTURES
    by = "our own decoder" if is_own else "transformers' modules"
    what = f"its text part as `{architecture}`" if is_part else f"`{architecture}`"
    divides = (
        is_own and ARCHITECTURES[architecture].qk_norm != "projection" and not ARCHITECTURES[architecture].has_altup
    )
    ranks = "yes" if divides or architecture in TENSOR_PARALLEL else "no"
    in_gguf = {"Qwen3NextForCausalLM"} | {
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for _, kind, _ in GGUF_MODELS.values()
    }
    formats = "safetensors, GGUF" if architecture in in_gguf and not names.startswith(NOT_AS_GGUF) else "safetensors"
    return f"| {names} | {what}, by {by} | {formats} | {ranks} |"
