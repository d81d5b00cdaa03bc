"""OTHER_KINDS: older and rarer kinds of multimodal checkpoints whose text part is served."""

from __future__ import annotations

from typing import Any

from tests.engine.models.adapter.tiny_models import WINDOW
from tests.engine.models.multimodal.tiny_multimodal import (
    CLIP,
    EXPERTS,
    GATED_DELTA,
    MISTRAL,
    PIXTRAL,
    QWEN_VISION,
    SIGLIP,
    TEXT,
    TinyMultimodal,
)

_LLAMA = TEXT | {"model_type": "llama"}
_QWEN2 = TEXT | {"model_type": "qwen2", "rope_theta": 1e5}
_QWEN3 = TEXT | {"model_type": "qwen3", "head_dim": 16, "rope_theta": 1e5}
_COHERE2 = TEXT | {"model_type": "cohere2", "sliding_window": WINDOW, "logit_scale": 0.25}
_COHERE2 |= {"layer_types": ["sliding_attention", "full_attention"], "eos_token_id": 2}
_HEADLESS = SIGLIP | {"vision_use_head": False}
_INTERNVL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
_INTERNVL |= {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]}
_IDEFICS = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
_IDEFICS |= {"image_size": 28, "patch_size": 14}
_AUDIO = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_AUDIO |= {"num_mel_bins": 8, "max_source_positions": 16}
_GLM_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 16}
_GLM_VISION |= {"image_size": 28, "patch_size": 14}
_GLM_TOKENS = {"image_token_id": 110, "video_token_id": 111, "image_start_token_id": 112, "image_end_token_id": 113}
_GLM_TOKENS |= {"video_start_token_id": 114, "video_end_token_id": 115}
_UNTIED: dict[str, Any] = {"tie_word_embeddings": False, "image_token_index": 119}
_GRID = {"image_grid_pinpoints": [[28, 56], [56, 28]]}

_IN_LANGUAGE_MODEL = ("language_model.model.layers.0.self_attn.q_proj.weight", "language_model.lm_head.weight")
_TIED = ("language_model.model.layers.0.self_attn.q_proj.weight",)
_IN_TEXT_MODEL = ("model.text_model.layers.0.self_attn.q_proj.weight", "lm_head.weight")
_UNDER_MODEL = ("model.language_model.layers.0.self_attn.q_proj.weight", "lm_head.weight")

OTHER_KINDS: dict[str, TinyMultimodal] = {
    "llava-next": TinyMultimodal(
        "llava-v1.6-vicuna-7b-hf, llava-v1.6-vicuna-13b-hf, llama3-llava-next-8b-hf",
        "LlavaNextForConditionalGeneration",
        "llava_next",
        _LLAMA,
        {"vision_config": CLIP} | _UNTIED | _GRID,
        (*_IN_LANGUAGE_MODEL, "image_newline"),
        vision_prefix="vision_tower.vision_model.",
    ),
    "llava-next-mistral": TinyMultimodal(
        "llava-v1.6-mistral-7b-hf",
        "LlavaNextForConditionalGeneration",
        "llava_next",
        MISTRAL,
        {"vision_config": CLIP} | _UNTIED | _GRID,
        (*_IN_LANGUAGE_MODEL, "image_newline"),
        vision_prefix="vision_tower.vision_model.",
    ),
    "llava-next-qwen2": TinyMultimodal(
        "llava-next-72b-hf, llava-next-110b-hf",
        "LlavaNextForConditionalGeneration",
        "llava_next",
        _QWEN2,
        {"vision_config": CLIP} | _UNTIED | _GRID,
        (*_IN_LANGUAGE_MODEL, "image_newline"),
    ),
    "llava-next-granite": TinyMultimodal(
        "granite-vision-3.2-2b, granite-vision-3.3-2b",
        "LlavaNextForConditionalGeneration",
        "llava_next",
        TEXT
        | {"model_type": "granite", "attention_multiplier": 0.5, "embedding_multiplier": 3.0}
        | {"residual_multiplier": 0.7, "logits_scaling": 2.0},
        {"vision_config": _HEADLESS, "image_token_index": 119, "tie_word_embeddings": True} | _GRID,
        (*_TIED, "image_newline"),
    ),
    "llava-onevision": TinyMultimodal(
        "llava-onevision-qwen2-0.5b-ov-hf, llava-onevision-qwen2-7b-ov-hf, llava-onevision-qwen2-72b-ov-hf",
        "LlavaOnevisionForConditionalGeneration",
        "llava_onevision",
        _QWEN2,
        {"vision_config": _HEADLESS, "video_token_index": 118} | _UNTIED | _GRID,
        (*_IN_LANGUAGE_MODEL, "image_newline"),
    ),
    "internvl": TinyMultimodal(
        "InternVL3-1B-hf, InternVL3-8B-hf, InternVL3-38B-hf, InternVL3-78B-hf",
        "InternVLForConditionalGeneration",
        "internvl",
        _QWEN2,
        {"vision_config": _INTERNVL, "image_token_id": 119, "tie_word_embeddings": False},
        (*_IN_LANGUAGE_MODEL, "multi_modal_projector.linear_1.weight"),
    ),
    "internvl-qwen3": TinyMultimodal(
        "InternVL3_5-1B-HF, InternVL3_5-8B-HF, InternVL3_5-38B-HF",
        "InternVLForConditionalGeneration",
        "internvl",
        _QWEN3,
        {"vision_config": _INTERNVL, "image_token_id": 119, "tie_word_embeddings": False},
        (*_IN_LANGUAGE_MODEL, "multi_modal_projector.linear_1.weight"),
    ),
    "internvl-qwen3-moe": TinyMultimodal(
        "InternVL3_5-30B-A3B-HF",
        "InternVLForConditionalGeneration",
        "internvl",
        _QWEN3 | EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": True},
        {"vision_config": _INTERNVL, "image_token_id": 119, "tie_word_embeddings": False},
        _IN_LANGUAGE_MODEL,
    ),
    "internvl-gpt-oss": TinyMultimodal(
        "InternVL3_5-GPT-OSS-20B-A4B-Preview-HF",
        "InternVLForConditionalGeneration",
        "internvl",
        TEXT
        | {"model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
        {"vision_config": _INTERNVL, "image_token_id": 119, "tie_word_embeddings": False},
        (*_IN_LANGUAGE_MODEL, "language_model.model.layers.0.mlp.experts.gate_up_proj_bias"),
    ),
    "idefics3": TinyMultimodal(
        "SmolVLM-Instruct, SmolVLM-500M-Instruct, SmolVLM-256M-Instruct, Idefics3-8B-Llama3",
        "Idefics3ForConditionalGeneration",
        "idefics3",
        _LLAMA,
        {"vision_config": _IDEFICS, "image_token_id": 119, "tie_word_embeddings": False},
        (*_IN_TEXT_MODEL, "model.connector.modality_projection.proj.weight"),
    ),
    "smolvlm": TinyMultimodal(
        "SmolVLM2-256M-Video-Instruct, SmolVLM2-500M-Video-Instruct, SmolVLM2-2.2B-Instruct",
        "SmolVLMForConditionalGeneration",
        "smolvlm",
        _LLAMA,
        {"vision_config": _IDEFICS, "image_token_id": 119, "tie_word_embeddings": False},
        (*_IN_TEXT_MODEL, "model.connector.modality_projection.proj.weight"),
    ),
    "idefics2": TinyMultimodal(
        "idefics2-8b",
        "Idefics2ForConditionalGeneration",
        "idefics2",
        MISTRAL,
        {"vision_config": _IDEFICS, "image_token_id": 119, "tie_word_embeddings": False}
        | {"perceiver_config": {"hidden_size": 64, "resampler_n_latents": 2, "resampler_depth": 1}},
        _IN_TEXT_MODEL,
    ),
    "aya-vision": TinyMultimodal(
        "aya-vision-8b, aya-vision-32b",
        "AyaVisionForConditionalGeneration",
        "aya_vision",
        _COHERE2,
        {"vision_config": _HEADLESS, "image_token_index": 119, "tie_word_embeddings": True},
        _TIED,
    ),
    "cohere2-vision": TinyMultimodal(
        "command-a-vision-07-2025",
        "Cohere2VisionForConditionalGeneration",
        "cohere2_vision",
        _COHERE2,
        {"vision_config": _HEADLESS, "image_token_id": 119, "alignment_intermediate_size": 32}
        | {"tie_word_embeddings": True},
        (),
    ),
    "aria": TinyMultimodal(
        "Aria, Aria-Chat",
        "AriaForConditionalGeneration",
        "aria",
        TEXT | {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2},
        {"vision_config": _IDEFICS | {"model_type": "idefics3_vision"}, "projector_patch_to_query_dict": {"4": 2}}
        | _UNTIED,
        _IN_LANGUAGE_MODEL,
    ),
    "voxtral": TinyMultimodal(
        "Voxtral-Mini-3B-2507, Voxtral-Small-24B-2507",
        "VoxtralForConditionalGeneration",
        "voxtral",
        _LLAMA | {"head_dim": 16, "rope_theta": 1e5},
        {"audio_config": _AUDIO | {"model_type": "voxtral_encoder"}, "audio_token_id": 24},
        _IN_LANGUAGE_MODEL,
    ),
    "qwen2-audio": TinyMultimodal(
        "Qwen2-Audio-7B-Instruct",
        "Qwen2AudioForConditionalGeneration",
        "qwen2_audio",
        _QWEN2,
        {
            "audio_config": {"model_type": "qwen2_audio_encoder", "num_mel_bins": 8, "max_source_positions": 16}
            | {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": 16},
            "audio_token_index": 119,
        },
        _IN_LANGUAGE_MODEL,
    ),
    "got-ocr2": TinyMultimodal(
        "GOT-OCR-2.0-hf",
        "GotOcr2ForConditionalGeneration",
        "got_ocr2",
        _QWEN2,
        {
            "vision_config": {"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 1, "mlp_dim": 16}
            | {"num_attention_heads": 2, "image_size": 64, "window_size": 2, "global_attn_indexes": [0]},
            "image_token_index": 119,
            "tie_word_embeddings": True,
        },
        _TIED,
    ),
    "lighton-ocr": TinyMultimodal(
        "LightOnOCR-1B-1025",
        "LightOnOcrForConditionalGeneration",
        "lighton_ocr",
        _QWEN3,
        {"vision_config": PIXTRAL, "image_token_id": 119, "tie_word_embeddings": False},
        (),
    ),
    "glm-4v": TinyMultimodal(
        "GLM-4.1V-9B-Thinking, GLM-4.1V-9B-Base",
        "Glm4vForConditionalGeneration",
        "glm4v",
        TEXT
        | {"model_type": "glm4v_text"}
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}}
        | {"eos_token_id": [2, 3], "pad_token_id": 0},
        {"vision_config": _GLM_VISION, "tie_word_embeddings": False} | _GLM_TOKENS,
        (*_UNDER_MODEL, "model.visual.patch_embed.proj.weight"),
    ),
    "glm-4v-moe": TinyMultimodal(
        "GLM-4.5V",
        "Glm4vMoeForConditionalGeneration",
        "glm4v_moe",
        TEXT
        | {"model_type": "glm4v_moe_text", "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
        | {"first_k_dense_replace": 1, "attention_bias": True, "eos_token_id": [2, 3], "pad_token_id": 0}
        | {"rope_scaling": {"type": "default", "mrope_section": [1, 2, 1]}, "partial_rotary_factor": 0.5},
        {"vision_config": _GLM_VISION, "tie_word_embeddings": False} | _GLM_TOKENS,
        (*_UNDER_MODEL, "model.visual.patch_embed.proj.weight"),
    ),
    "glm-4.6v": TinyMultimodal(
        "GLM-4.6V",
        "Glm46VForConditionalGeneration",
        "glm46v",
        TEXT
        | {"model_type": "glm4v_moe_text", "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
        | {"first_k_dense_replace": 1, "attention_bias": True, "eos_token_id": [2, 3], "pad_token_id": 0}
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}},
        {"vision_config": _GLM_VISION | {"model_type": "glm4v_moe_vision"}, "tie_word_embeddings": False} | _GLM_TOKENS,
        _UNDER_MODEL,
    ),
    "glm-4.6v-flash": TinyMultimodal(
        "GLM-4.6V-Flash",
        "Glm46VForConditionalGeneration",
        "glm46v",
        TEXT
        | {"model_type": "glm4v_text"}
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}}
        | {"eos_token_id": [2, 3], "pad_token_id": 0},
        {"vision_config": _GLM_VISION | {"model_type": "glm4v_vision"}, "tie_word_embeddings": False} | _GLM_TOKENS,
        _UNDER_MODEL,
    ),
    "minicpm-v-4.6": TinyMultimodal(
        "MiniCPM-V-4.6",
        "MiniCPMV4_6ForConditionalGeneration",
        "minicpmv4_6",
        TEXT | GATED_DELTA | {"model_type": "qwen3_5_text", "eos_token_id": 2},
        {"vision_config": _IDEFICS | {"num_hidden_layers": 2}, "insert_layer_id": 0, "tie_word_embeddings": False}
        | {"image_token_id": 110, "video_token_id": 111},
        ("model.language_model.layers.0.linear_attn.in_proj_qkv.weight", "lm_head.weight"),
    ),
    "video-llama3": TinyMultimodal(
        "VideoLLaMA3-2B-Image-HF",
        "VideoLlama3ForConditionalGeneration",
        "video_llama_3",
        _QWEN2,
        {"vision_config": _IDEFICS, "image_token_id": 110, "video_token_id": 111, "tie_word_embeddings": False},
        (),
    ),
    "exaone-4.5": TinyMultimodal(
        "EXAONE-4.5-33B",
        "Exaone4_5_ForConditionalGeneration",
        "exaone4_5",
        TEXT | {"model_type": "exaone4", "sliding_window": WINDOW, "sliding_window_pattern": 2},
        {"vision_config": QWEN_VISION | {"fullatt_block_indexes": [0], "num_key_value_heads": 2}}
        | {"image_token_id": 110, "video_token_id": 111, "tie_word_embeddings": False},
        (),
    ),
    "llava-next-video": TinyMultimodal(
        "LLaVA-NeXT-Video-7B-hf",
        "LlavaNextVideoForConditionalGeneration",
        "llava_next_video",
        _LLAMA,
        {"vision_config": CLIP, "video_token_index": 118} | _UNTIED | _GRID,
        (*_IN_LANGUAGE_MODEL, "image_newline"),
    ),
    "vip-llava": TinyMultimodal(
        "vip-llava-7b-hf, vip-llava-13b-hf",
        "VipLlavaForConditionalGeneration",
        "vipllava",
        _LLAMA,
        {"vision_config": CLIP, "vision_feature_layers": [-1]} | _UNTIED,
        _IN_LANGUAGE_MODEL,
    ),
    "deepseek-vl": TinyMultimodal(
        "deepseek-vl-1.3b-chat, deepseek-vl-7b-chat of deepseek-community",
        "DeepseekVLForConditionalGeneration",
        "deepseek_vl",
        _LLAMA,
        {"vision_config": _HEADLESS, "image_token_id": 119, "tie_word_embeddings": False},
        _UNDER_MODEL,
    ),
    "ovis2": TinyMultimodal(
        "Ovis2-1B-hf, Ovis2-8B-hf, Ovis2-34B-hf",
        "Ovis2ForConditionalGeneration",
        "ovis2",
        _QWEN2,
        {"vision_config": _IDEFICS | {"vocab_size": 20, "num_visual_indicator_tokens": 5, "hidden_stride": 1}}
        | {"image_token_id": 110, "visual_indicator_token_ids": [111, 112, 113, 114, 115], "vocab_size": 120}
        | {"hidden_size": 64, "tie_word_embeddings": False},
        (),
    ),
    "glm-asr": TinyMultimodal(
        "GLM-ASR-Nano-2512",
        "GlmAsrForConditionalGeneration",
        "glmasr",
        _LLAMA | {"head_dim": 16, "eos_token_id": [2, 3]},
        {"audio_config": _AUDIO | {"model_type": "glmasr_encoder", "head_dim": 8}, "audio_token_id": 24}
        | {"tie_word_embeddings": False},
        _IN_LANGUAGE_MODEL,
    ),
    "audio-flamingo3": TinyMultimodal(
        "audio-flamingo-3-hf",
        "AudioFlamingo3ForConditionalGeneration",
        "audioflamingo3",
        _QWEN2,
        {"audio_config": _AUDIO | {"model_type": "audioflamingo3_encoder"}, "audio_token_id": 24},
        _IN_LANGUAGE_MODEL,
    ),
}
