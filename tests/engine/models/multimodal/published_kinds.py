"""PUBLISHED_KINDS: the kinds of multimodal checkpoints whose text part is served, each as a tiny one."""

from __future__ import annotations

from tests.engine.models.adapter.tiny_models import WINDOW
from tests.engine.models.multimodal.tiny_multimodal import (
    CLIP,
    EXPERTS,
    GATED_DELTA,
    GEMMA4,
    GEMMA4_TOKENS,
    IMAGE_TOKENS,
    LATENT,
    MISTRAL,
    PIXTRAL,
    PLAIN_VISION,
    QWEN_VISION,
    SIGLIP,
    TEXT,
    YARN,
    TinyMultimodal,
)

GEMMA4_VISION = PLAIN_VISION | {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 8}
GEMMA4_VISION |= {"patch_size": 2, "position_embedding_size": 4, "pooling_kernel_size": 2}
LLAMA4_VISION = PLAIN_VISION | {"image_size": 28, "patch_size": 14, "vision_output_dim": 16}
LLAMA4_VISION |= {"projector_input_dim": 16, "projector_output_dim": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
LLAMA3 |= {"original_max_position_embeddings": 8}
LLAVA_NAMES = ("language_model.model.layers.0.self_attn.q_proj.weight", "language_model.model.embed_tokens.weight")
LLAVA_NAMES += ("language_model.lm_head.weight", "multi_modal_projector.linear_1.weight")

PUBLISHED_KINDS: dict[str, TinyMultimodal] = {
    "gemma3": TinyMultimodal(
        "gemma-3-4b-it, gemma-3-12b-it, gemma-3-27b-it, medgemma-4b-it",
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {key: value for key, value in TEXT.items() if key != "max_position_embeddings"}
        | {"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": WINDOW}
        | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window_pattern": 2},
        {"vision_config": SIGLIP | {"vision_use_head": False}, "mm_tokens_per_image": 4, "eos_token_id": [1, 106]}
        | {"boi_token_index": 117, "eoi_token_index": 118, "image_token_index": 119},
        (
            *("language_model.model.layers.0.self_attn.q_norm.weight", "language_model.model.embed_tokens.weight"),
            "vision_tower.vision_model.embeddings.patch_embedding.weight",
            "multi_modal_projector.mm_input_projection_weight",
        ),
        vision_prefix="vision_tower.vision_model.",
    ),
    "gemma4": TinyMultimodal(
        "gemma-4-31B-it, gemma-4-26B-A4B, gemma-4-26B-A4B-it",
        "Gemma4ForConditionalGeneration",
        "gemma4",
        TEXT
        | GEMMA4
        | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "enable_moe_block": True}
        | {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
        {"vision_config": GEMMA4_VISION, "audio_config": None, "tie_word_embeddings": True, **GEMMA4_TOKENS},
        (
            *("model.language_model.layers.0.layer_scalar", "model.language_model.layers.1.router.per_expert_scale"),
            *("model.language_model.layers.0.experts.gate_up_proj", "model.language_model.embed_tokens.weight"),
            "model.embed_vision.embedding_projection.weight",
        ),
    ),
    "gemma4-e4b": TinyMultimodal(
        "gemma-4-E2B-it, gemma-4-E4B-it",
        "Gemma4ForConditionalGeneration",
        "gemma4",
        TEXT
        | GEMMA4
        | {"model_type": "gemma4_text", "num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "attention_k_eq_v": False}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 120},
        {"vision_config": GEMMA4_VISION, "audio_config": None, "tie_word_embeddings": True, **GEMMA4_TOKENS},
        (
            "model.language_model.embed_tokens_per_layer.weight",
            "model.language_model.layers.3.per_layer_input_gate.weight",
        ),
    ),
    "gemma4-unified": TinyMultimodal(
        "gemma-4-12B-it",
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified",
        TEXT | GEMMA4 | {"model_type": "gemma4_unified_text"},
        {"vision_config": {"patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 8, "mm_posemb_size": 4}}
        | {"audio_config": {"audio_embed_dim": 8}, "tie_word_embeddings": True, **GEMMA4_TOKENS},
        ("model.language_model.layers.0.layer_scalar", "model.language_model.embed_tokens.weight"),
    ),
    "mistral3": TinyMultimodal(
        "Mistral-Small-3.1-24B-Instruct-2503, Mistral-Small-3.2-24B-Instruct-2506, Magistral-Small-2509",
        "Mistral3ForConditionalGeneration",
        "mistral3",
        MISTRAL,
        {"vision_config": PIXTRAL, "image_token_index": 10, "tie_word_embeddings": False, "spatial_merge_size": 2},
        (*LLAVA_NAMES, "vision_tower.patch_conv.weight", "multi_modal_projector.patch_merger.merging_layer.weight"),
    ),
    "ministral3": TinyMultimodal(
        "Ministral-3-3B-Instruct-2512, Ministral-3-8B-Instruct-2512, Ministral-3-14B-Instruct-2512",
        "Mistral3ForConditionalGeneration",
        "mistral3",
        TEXT | {"model_type": "ministral3", "head_dim": 16, "rope_parameters": YARN, "sliding_window": None},
        {"vision_config": PIXTRAL, "image_token_index": 10, "tie_word_embeddings": True, "spatial_merge_size": 2},
        ("language_model.model.layers.0.self_attn.q_proj.weight", "language_model.model.embed_tokens.weight"),
    ),
    "mistral4": TinyMultimodal(
        "Mistral-Small-4-119B-2603",
        "Mistral3ForConditionalGeneration",
        "mistral3",
        LATENT | {"model_type": "mistral4", "norm_topk_prob": True, "rope_parameters": YARN | {"mscale_all_dim": 1.0}},
        {"vision_config": PIXTRAL, "image_token_index": 10, "tie_word_embeddings": False, "spatial_merge_size": 2},
        ("language_model.model.layers.0.self_attn.kv_b_proj.weight", "language_model.lm_head.weight"),
    ),
    "kimi-k2.5": TinyMultimodal(
        "Kimi-K2.5, Kimi-K2.6, Kimi-K2.7-Code",
        "Kimi_K25ForConditionalGeneration",
        "kimi_k25",
        LATENT | {"model_type": "kimi_k2", "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        {"vision_config": PLAIN_VISION | {"merge_kernel_size": [2, 2], "pos_emb_height": 4, "pos_emb_width": 4}}
        | {"projection_hidden_size": 16, "tie_word_embeddings": False},
        ("language_model.model.layers.0.self_attn.q_a_proj.weight", "language_model.lm_head.weight"),
        published_as="KimiK25ForConditionalGeneration",
    ),
    "qwen2-vl": TinyMultimodal(
        "Qwen2-VL-2B-Instruct, Qwen2-VL-7B-Instruct, Qwen2-VL-72B-Instruct",
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        TEXT
        | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e5, "rms_norm_eps": 1e-6}
        | {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 2},
        {"vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "in_chans": 3}}
        | {"eos_token_id": 2, "tie_word_embeddings": False, **IMAGE_TOKENS},
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
        TEXT
        | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e5, "rms_norm_eps": 1e-6}
        | {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 2},
        {"vision_config": QWEN_VISION | {"model_type": "qwen2_5_vl", "fullatt_block_indexes": [0]}}
        | {"eos_token_id": 2, "tie_word_embeddings": True, **IMAGE_TOKENS},
        ("model.layers.0.self_attn.q_proj.bias", "model.embed_tokens.weight", "visual.blocks.0.attn.qkv.weight"),
        is_flat=True,
    ),
    "qwen3-vl": TinyMultimodal(
        "Qwen3-VL-2B-Instruct, Qwen3-VL-4B-Instruct, Qwen3-VL-8B-Instruct, Qwen3-VL-32B-Instruct",
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        TEXT
        | {"model_type": "qwen3_vl_text", "head_dim": 16, "eos_token_id": 2, "rope_theta": 1e5}
        | {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}},
        {"vision_config": QWEN_VISION | {"model_type": "qwen3_vl", "deepstack_visual_indexes": [0]}}
        | {"tie_word_embeddings": False, **IMAGE_TOKENS},
        ("model.language_model.layers.0.self_attn.q_norm.weight", "lm_head.weight", "model.visual.pos_embed.weight"),
    ),
    "qwen3-vl-moe": TinyMultimodal(
        "Qwen3-VL-30B-A3B-Instruct, Qwen3-VL-235B-A22B-Instruct",
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        TEXT
        | EXPERTS
        | {"model_type": "qwen3_vl_moe_text", "head_dim": 16, "eos_token_id": 2, "rope_theta": 1e5}
        | {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}},
        {"vision_config": QWEN_VISION | {"model_type": "qwen3_vl_moe", "deepstack_visual_indexes": [0]}}
        | {"tie_word_embeddings": False, **IMAGE_TOKENS},
        ("model.language_model.layers.0.mlp.experts.gate_up_proj", "lm_head.weight", "model.visual.pos_embed.weight"),
        experts_are_turned=True,
    ),
    "qwen3.5": TinyMultimodal(
        "Qwen3.5-27B, Qwen3.6-27B",
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        TEXT | GATED_DELTA | {"model_type": "qwen3_5_text"},
        {"vision_config": QWEN_VISION | {"model_type": "qwen3_5"}, "tie_word_embeddings": False, **IMAGE_TOKENS},
        ("model.language_model.layers.0.linear_attn.in_proj_qkv.weight", "lm_head.weight"),
    ),
    "qwen3.5-moe": TinyMultimodal(
        "Qwen3.5-35B-A3B, Qwen3.5-122B-A10B, Qwen3.5-397B-A17B, Qwen3.6-35B-A3B",
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        TEXT
        | EXPERTS
        | GATED_DELTA
        | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 24, "eos_token_id": 2},
        {"vision_config": QWEN_VISION | {"model_type": "qwen3_5_moe"}, "tie_word_embeddings": False, **IMAGE_TOKENS},
        ("model.language_model.layers.0.mlp.shared_expert_gate.weight", "lm_head.weight"),
    ),
    "llama4": TinyMultimodal(
        "Llama-4-Scout-17B-16E-Instruct, Llama-4-Maverick-17B-128E-Instruct",
        "Llama4ForConditionalGeneration",
        "llama4",
        TEXT
        | {"model_type": "llama4_text", "head_dim": 16, "num_hidden_layers": 4, "attention_chunk_size": 8}
        | {"intermediate_size_mlp": 56, "interleave_moe_layer_step": 2, "num_local_experts": 4, "use_qk_norm": True}
        | {"rope_theta": 5e5, "rope_scaling": LLAMA3, "floor_scale": 4, "torch_dtype": "float32"},
        {"vision_config": LLAMA4_VISION, "tie_word_embeddings": False, "image_token_index": 119}
        | {"boi_token_index": 117, "eoi_token_index": 118},
        (
            "language_model.model.layers.0.feed_forward.gate_proj.weight",
            "language_model.model.layers.1.feed_forward.experts.gate_up_proj",
            "language_model.model.layers.1.feed_forward.shared_expert.down_proj.weight",
            *("language_model.model.layers.1.feed_forward.router.weight", "language_model.lm_head.weight"),
            *("vision_model.patch_embedding.linear.weight", "multi_modal_projector.linear_1.weight"),
        ),
        generates_with="language_model",  # the class asks that for the outputs of images
    ),
    "lfm2-vl": TinyMultimodal(
        "LFM2-VL-450M, LFM2-VL-1.6B, LFM2.5-VL-1.6B",
        "Lfm2VlForConditionalGeneration",
        "lfm2_vl",
        TEXT
        | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_multiple_of": 8}
        | {"tie_word_embeddings": True},
        {
            "vision_config": PLAIN_VISION
            | {"model_type": "siglip2_vision_model", "num_patches": 4, "patch_size": 2, "vision_use_head": False},
            "projector_hidden_size": 16,
            "image_token_id": 119,
            "tie_word_embeddings": True,
        },
        ("model.language_model.layers.0.conv.conv.weight",),
    ),
    "llava": TinyMultimodal(
        "llava-1.5-7b-hf, llava-1.5-13b-hf",
        "LlavaForConditionalGeneration",
        "llava",
        TEXT | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"vision_config": CLIP, "image_token_index": 119, "tie_word_embeddings": False},
        (*LLAVA_NAMES, "vision_tower.vision_model.embeddings.class_embedding"),
        vision_prefix="vision_tower.vision_model.",
    ),
    "pixtral": TinyMultimodal(
        "pixtral-12b",
        "LlavaForConditionalGeneration",
        "llava",
        MISTRAL,
        {"vision_config": PIXTRAL, "image_token_index": 10, "vision_feature_layer": -1, "tie_word_embeddings": False}
        | {"vision_feature_select_strategy": "full"},
        (*LLAVA_NAMES, "vision_tower.patch_conv.weight"),
    ),
    "llava-qwen2": TinyMultimodal(
        "llava-interleave-qwen-7b-hf",
        "LlavaForConditionalGeneration",
        "llava",
        TEXT | {"model_type": "qwen2", "rope_theta": 1e5},
        {"vision_config": SIGLIP | {"vision_use_head": False}, "image_token_index": 119, "tie_word_embeddings": False},
        LLAVA_NAMES,
    ),
}
