"""The config of a text part: from either level of config.json, and with the defaults of transformers' classes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deployments.config import AppConfig
from engine.errors import ConfigError, ModelLoadError
from engine.models.config.families.architectures import PROVEN
from engine.models.config.families.table import ARCHITECTURES
from engine.models.config.files.generation_defaults import GenerationDefaults
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.files.text_parts import MULTIMODAL, TEXT_ARCHITECTURES
from engine.models.config.implementation import read_shape
from engine.models.config.model_config import ModelConfig
from engine.models.config.model_shape import attends_causally
from engine.models.config.transformers_config import TransformersConfig
from tests.engine.models.multimodal.tiny_checkpoints import TINY

# As published; the fields that they lack are defaults of transformers' classes.
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
QWEN3_VL_30B: dict[str, Any] = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl_moe",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
        "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 262144, "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000, "use_cache": True, "vocab_size": 151936,
    },
    "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0", "video_token_id": 151656,
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_vl_moe", "out_hidden_size": 2048},
}  # fmt: skip
QWEN2_5_VL_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
    "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu",
    "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000,
    "max_window_layers": 28, "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "model_type": "qwen2_5_vl"},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 152064,
}  # fmt: skip


def write(path: Path, raw: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(raw))
    return path


def own(path: Path, raw: dict[str, Any]) -> ModelConfig:
    shape = read_shape(load_hf_config(write(path, raw)), "auto")
    assert isinstance(shape, ModelConfig)
    return shape


def test_gemma_3_has_the_defaults_of_its_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        shape = own(tmp_path, GEMMA3_4B)
    assert "Of Gemma3ForConditionalGeneration the text part is served, as Gemma3ForCausalLM" in caplog.text
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.vocab_size) == (8, 4, 256, 262208)
    assert (shape.max_position_embeddings, shape.dtype, shape.tie_word_embeddings) == (131072, torch.bfloat16, True)
    assert [shape.windows.count(window) for window in (1024, None)] == [29, 5]
    assert GenerationDefaults.load(tmp_path, load_hf_config(tmp_path)).eos_token_ids == (1, 106)


def test_experts_of_qwen3_vl_are_those_of_qwen3(tmp_path: Path) -> None:
    shape = own(tmp_path, QWEN3_VL_30B)
    experts = shape.experts
    assert experts is not None
    assert (shape.architecture, len(experts.layers)) == ("Qwen3MoeForCausalLM", 48)
    assert (experts.num_experts, experts.experts_per_token, experts.intermediate_size) == (128, 8, 768)
    assert experts.normalizes_weights
    assert (shape.max_position_embeddings, shape.dtype, shape.tie_word_embeddings) == (262144, torch.bfloat16, False)


def test_routers_of_qwen3_vl_normalise_whatever_the_config_says(tmp_path: Path) -> None:
    text = QWEN3_VL_30B["text_config"] | {"norm_topk_prob": False}
    shape = own(tmp_path, QWEN3_VL_30B | {"text_config": text})
    assert shape.experts is not None
    assert shape.experts.normalizes_weights


def test_fields_of_a_text_part_may_be_at_the_top(tmp_path: Path) -> None:
    shape = own(tmp_path, QWEN2_5_VL_7B)
    assert (shape.architecture, shape.num_layers, shape.vocab_size) == ("Qwen2ForCausalLM", 28, 152064)
    assert (shape.windows, shape.max_position_embeddings) == ((None,) * 28, 128000)
    assert (shape.dtype, shape.rope.layer_types) == (torch.bfloat16, (None,))
    assert GenerationDefaults.load(tmp_path, load_hf_config(tmp_path)).eos_token_ids == (151645,)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(("top", "text"), [("float16", None), (None, "float16"), ("float16", "bfloat16")])
def test_the_dtype_is_that_of_the_whole_or_else_of_the_text_part(
    tmp_path: Path, top: str | None, text: str | None, name: str
) -> None:
    """transformers loads LLaVA 1.6 in the dtype of the whole, which its weights have; its text part names another."""
    fields = {key: value for key, value in TINY["llava-next-mistral"].config_json.items() if key != "dtype"}
    fields |= {name: top} if top else {}
    fields["text_config"] = fields["text_config"] | ({name: text} if text else {})
    assert own(tmp_path, fields).dtype == torch.float16


@pytest.mark.parametrize(("top", "text", "ids"), [(7, None, (7,)), (None, 8, (8,)), ([7, 9], 8, (7, 9))])
def test_end_tokens_may_be_at_either_level(tmp_path: Path, top: Any, text: Any, ids: tuple[int, ...]) -> None:
    fields = TINY["qwen3-vl"].config_json
    fields |= {} if top is None else {"eos_token_id": top}
    fields["text_config"] = fields["text_config"] | {"eos_token_id": text}
    config = load_hf_config(write(tmp_path, fields))
    assert GenerationDefaults.load(tmp_path, config).eos_token_ids == ids
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert GenerationDefaults.load(tmp_path, config).eos_token_ids == (3, 4)


@pytest.mark.parametrize("is_tied", [True, False])
def test_embeddings_are_tied_as_the_whole_config_says(tmp_path: Path, is_tied: bool) -> None:
    assert own(tmp_path, TINY["qwen3-vl"].config_json | {"tie_word_embeddings": is_tied}).tie_word_embeddings is is_tied


def test_text_parts_are_computed_by_the_architectures_of_transformers() -> None:
    known = {kind: name for kind, name in TEXT_ARCHITECTURES.items() if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert known == {kind: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in known}
    served = {TEXT_ARCHITECTURES[kind] for kinds in MULTIMODAL.values() for kind in kinds}
    not_mapped = {"Mistral4ForCausalLM"}  # transformers has the class, and none for the model type
    assert served - not_mapped <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    assert served <= PROVEN | ARCHITECTURES.keys()


@pytest.mark.parametrize(
    ("text_type", "message"),
    [
        ("qwen3", "'Mistral3ForConditionalGeneration' is not supported with a text_config of the model_type 'qwen3'"),
        ("phi", "with a text_config of the model_type 'phi': no test has compared it .*; supported: mistral, minist"),
        (5, "with a text_config of the model_type 5: no test has compared it"),
    ],
)
def test_a_text_part_that_is_not_served_is_named(tmp_path: Path, text_type: Any, message: str) -> None:
    fields = TINY["mistral3"].config_json
    fields["text_config"] = fields["text_config"] | {"model_type": text_type}
    with pytest.raises(ModelLoadError, match=message):
        load_hf_config(write(tmp_path, fields))


def test_attention_within_images_does_not_concern_text() -> None:
    values = {None: True, False: True, "vision": True, True: False, "all": False}
    for value, expected in values.items():
        assert attends_causally(SimpleNamespace(use_bidirectional_attention=value)) is expected
    assert attends_causally(SimpleNamespace())


def test_implausible_values_of_a_text_part_are_refused(tmp_path: Path) -> None:
    fields = TINY["qwen3-vl"].config_json
    fields["text_config"] = fields["text_config"] | {"num_hidden_layers": 10**9}
    with pytest.raises(ModelLoadError, match="num_hidden_layers=1000000000 is not an integer from 1 to 512"):
        load_hf_config(write(tmp_path, fields))


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen2.5-vl"])
def test_a_launcher_knows_the_positions_of_a_text_part(tmp_path: Path, name: str) -> None:
    write(tmp_path, TINY[name].config_json)
    (tmp_path / "tokenizer.json").write_text("{}")
    AppConfig.parse({"model": str(tmp_path), "engine": {"max_model_len": 128}}).require_model()
    with pytest.raises(ConfigError, match="max_model_len=129 exceeds the model's 128 positions"):
        AppConfig.parse({"model": str(tmp_path), "engine": {"max_model_len": 129}}).require_model()


def test_both_implementations_read_a_text_part(tmp_path: Path) -> None:
    config = load_hf_config(write(tmp_path, TINY["ministral3"].config_json))
    assert isinstance(read_shape(config, "auto"), TransformersConfig)
    config = load_hf_config(write(tmp_path, TINY["mistral3"].config_json))
    assert isinstance(read_shape(config, "transformers"), TransformersConfig)
