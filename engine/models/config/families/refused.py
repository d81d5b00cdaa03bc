"""Architectures that are refused, and why: what an engine would compute wrongly, or cannot compute."""

from __future__ import annotations

__all__ = ["CONDITIONAL", "NOT_TEXT_ONLY", "REFUSED", "REFUSED_TEXT_PARTS", "UNKNOWN", "is_refused", "reason_of"]

_RECURRENT = "its recurrent layers are of a kind that is not computed"
_CONVOLUTIONAL = "its convolutional layers are of a kind that is not computed"
_TWO_LATENTS = "each of its layers has two latent attentions, and experts that compute nothing"
_LATENT = "no test has compared its latent attention with transformers"
_KIMI_K3 = "its text part is not Kimi Linear: latent attention has gates, layers add earlier ones, and SiTU is for SiLU"
_SPARSE = "its sparse attention chooses keys in a way of its own, which is not computed"
_ENCODER = "it is an encoder, or needs one"
_OWN_ATTENTION = "its modules do not use transformers' attention interface"
_ALIBI = "it has ALiBi instead of positions, and its modules do not use transformers' attention interface"
_MULTIMODAL = "it also takes images or sound, and no test has compared its text part with transformers"
_NO_CLASS = "transformers has no class of this name, and code of a checkpoint's own is never run"
_OWN_MASK = "its attention masks are its own, neither causal nor a sliding window"

_BY_REASON: dict[str, tuple[str, ...]] = {
    _RECURRENT: (
        "BailingHybridForCausalLM",
        "FalconMambaForCausalLM",
        "JambaForCausalLM",
        "LaraMiniForCausalLM",
        "MambaForCausalLM",
        "MiniMaxForCausalLM",
        "RecurrentGemmaForCausalLM",
        "RwkvForCausalLM",
        "Zamba2ForCausalLM",
        "ZambaForCausalLM",
        "xLSTMForCausalLM",
    ),
    _CONVOLUTIONAL: (
        "Inkling2ForCausalLM",
        "Inkling2LoopForCausalLM",
        "InklingForCausalLM",
        "Lfm3ForCausalLM",
        "ZayaForCausalLM",
    ),
    _LATENT: ("AXK1ForCausalLM",),
    _TWO_LATENTS: ("LongcatFlashForCausalLM",),
    _KIMI_K3: ("KimiK3ForConditionalGeneration",),
    _SPARSE: (
        "AXK2ForCausalLM",
        "DeepseekV4ForCausalLM",
        "Dots3NoteForCausalLM",
        "HYV4ForCausalLM",
        "MiniMaxM3ForCausalLM",
        "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3VLForCausalLM",
        "Qwen4ExpForCausalLM",
    ),
    "it drafts tokens for another model": ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
    "it generates blocks of tokens by diffusion": ("DiffusionGemmaForBlockDiffusion",),
    "its tokens are bytes, which an encoder of its own joins to patches": ("BltForCausalLM",),
    "it may give logits for fewer tokens than it reads": ("Apertus1p5TextForCausalLM",),
    "each of its layers runs several times a token, with keys and values of its own each time": ("DoryForCausalLM",),
    "its layers of cross-attention, which text alone leaves out, are not left out": (
        "MllamaForCausalLM",
        "MllamaForConditionalGeneration",
    ),
    "each token of its prompt attends to all the others, also to later ones": ("PaliGemmaForConditionalGeneration",),
    _ENCODER: (
        "BartForCausalLM",
        "BertGenerationDecoder",
        "BertLMHeadModel",
        "BigBirdForCausalLM",
        "BigBirdPegasusForCausalLM",
        "BlenderbotForCausalLM",
        "BlenderbotSmallForCausalLM",
        "CamembertForCausalLM",
        "Data2VecTextForCausalLM",
        "ElectraForCausalLM",
        "EncoderDecoderModel",
        "ErnieForCausalLM",
        "MBartForCausalLM",
        "MarianForCausalLM",
        "MarianMTModel",
        "MegatronBertForCausalLM",
        "MvpForCausalLM",
        "PLBartForCausalLM",
        "PegasusForCausalLM",
        "ProphetNetForCausalLM",
        "RemBertForCausalLM",
        "RoCBertForCausalLM",
        "RoFormerForCausalLM",
        "RobertaForCausalLM",
        "RobertaPreLayerNormForCausalLM",
        "SeamlessM4TForTextToText",
        "SeamlessM4Tv2ForTextToText",
        "T5ForConditionalGeneration",
        "TrOCRForCausalLM",
        "VisionEncoderDecoderModel",
        "WhisperForCausalLM",
        "WhisperForConditionalGeneration",
        "XLMRobertaForCausalLM",
        "XLMRobertaXLForCausalLM",
        "XLMWithLMHeadModel",
        "XmodForCausalLM",
    ),
    _ALIBI: ("BloomForCausalLM", "MptForCausalLM"),
    _OWN_ATTENTION: (
        "CodeGenForCausalLM",
        "CpmAntForCausalLM",
        "FalconForCausalLM",
        "GPTJForCausalLM",
        "GPTNeoForCausalLM",
        "GPTNeoXJapaneseForCausalLM",
        "OpenAIGPTLMHeadModel",
        "ReformerModelWithLMHead",
        "XGLMForCausalLM",
        "XLNetLMHeadModel",
    ),
    _OWN_MASK: ("DogeForCausalLM",),
    _NO_CLASS: (
        "BaichuanForCausalLM",
        "ChatGLMForConditionalGeneration",
        "ChatGLMModel",
        "DeciLMForCausalLM",
        "DeepseekVLV2ForCausalLM",
        "Grok1ForCausalLM",
        "InternLM2ForCausalLM",
        "InternLM3ForCausalLM",
        "LlavaLlamaForCausalLM",
        "LlavaMistralForCausalLM",
        "LlavaQwenForCausalLM",
        "MiniCPMForCausalLM",
        "MolmoForCausalLM",
        "Phi3SmallForCausalLM",
        "QWenLMHeadModel",
        "Step3VLForConditionalGeneration",
    ),
    "its layers differ in the number of their attention heads": (
        "Step3p5ForCausalLM",
        "Step3p7FlashForCausalLM",
        "Step3p7ForConditionalGeneration",
    ),
    _MULTIMODAL: (
        "CohereCompassForCausalLM",
        "Emu3ForCausalLM",
        "EvollaForProteinText2Text",
        "FastVlmForConditionalGeneration",
        "FuyuForCausalLM",
        "GitForCausalLM",
        "IdeficsForVisionText2Text",
        "MiniCPMOcrForConditionalGeneration",
        "MiniCPMV4_7ForConditionalGeneration",
        "MoshiForCausalLM",
        "MusicgenForCausalLM",
        "MusicgenMelodyForCausalLM",
        "NemotronH_Omni_Reasoning_V3",
        "PerceptionLMForConditionalGeneration",
        "Phi4MultimodalForCausalLM",
        "Qwen3ASRForConditionalGeneration",
    ),
}

REFUSED: dict[str, str] = {name: reason for reason, names in _BY_REASON.items() for name in names}

# Multimodal architectures whose text part is an architecture that is refused.
REFUSED_TEXT_PARTS = {
    "Apertus1p5ForConditionalGeneration": "Apertus1p5TextForCausalLM",
    "Dots3NoteForConditionalGeneration": "Dots3NoteForCausalLM",
    "HYV4VLForConditionalGeneration": "HYV4ForCausalLM",
    "Inkling2ForConditionalGeneration": "Inkling2ForCausalLM",
    "Inkling2LoopForConditionalGeneration": "Inkling2LoopForCausalLM",
    "InklingForConditionalGeneration": "InklingForCausalLM",
    "Lfm3VlForConditionalGeneration": "Lfm3ForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration": "MiniMaxM3VLForCausalLM",
    "Qwen4ExpForConditionalGeneration": "Qwen4ExpForCausalLM",
}

CONDITIONAL = "ForConditionalGeneration"  # how the names of encoder-decoders and of models of images or sound end
NOT_TEXT_ONLY = "it is an encoder-decoder, or takes images or sound and no test has compared its text part"
UNKNOWN = "no test has compared it with transformers"
_NOT_GENERATIVE = "it does not generate text"
_OTHER_HEADS = ("Classification", "MaskedLM", "QuestionAnswering", "RewardModel", "TextModel", "Embedding", "Reranker")


def is_refused(name: str) -> bool:
    """Return whether an architecture is refused for a reason that is known from its name."""
    return name in REFUSED or name in REFUSED_TEXT_PARTS or name.endswith(_OTHER_HEADS)


def reason_of(name: str) -> str:
    """Return why an architecture is not served."""
    if name in REFUSED_TEXT_PARTS:
        part = REFUSED_TEXT_PARTS[name]
        return f"its text part, {part}, is not: {REFUSED[part]}"
    if name.endswith(_OTHER_HEADS):
        return REFUSED.get(name, _NOT_GENERATIVE)
    return REFUSED.get(name, NOT_TEXT_ONLY if name.endswith(CONDITIONAL) else UNKNOWN)
