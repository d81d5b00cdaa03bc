"""Llama 4 up to the length of a chunk, and its dense relatives. The oracle is the text part of the multimodal class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel

from engine.errors import ConfigError, ModelLoadError
from engine.models.config.implementation import read_shape
from engine.models.config.model_config import load_hf_config
from tests.engine.checkpoints import save_checkpoint
from tests.engine.models.adapter.greedy_answers import MAX_TOKENS, PROMPT_TOKENS, check, make_prompts, oracle
from tests.engine.models.adapter.tiny_models import build_model
from tests.engine.models.multimodal.tiny_checkpoints import COMPARED_APART
from tests.engine.models.multimodal.tiny_multimodal import PLAIN_VISION, TEXT
from tests.engine.oracle import make_llm

SETTING = (4, 7, True, 0.0)
CHUNK = PROMPT_TOKENS + MAX_TOKENS + 4
SCOUT: dict[str, Any] = TEXT | {
    "model_type": "llama4_text",
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 40,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": CHUNK,
    "attn_temperature_tuning": True,
    "floor_scale": 2 * CHUNK,
}
VISION = PLAIN_VISION | {"model_type": "llama4_vision_model", "image_size": 28, "patch_size": 14}
VISION |= {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}


def randomise(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.2)
    return model.eval()


def save(path: Path, text: dict[str, Any]) -> PreTrainedModel:
    """Write a multimodal checkpoint, and return its text part."""
    ((architecture, _),) = [pair for names, pair in COMPARED_APART.items() if "Llama-4" in names]
    fields = {"architectures": [architecture], "model_type": "llama4", "dtype": "float32", "text_config": text}
    fields |= {"vision_config": VISION, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = randomise(transformers.Llama4ForConditionalGeneration(CONFIG_MAPPING["llama4"].from_dict(fields)))
    model.save_pretrained(path, save_original_format=True)
    (path / "config.json").write_text(json.dumps(fields))
    part: PreTrainedModel = model.language_model
    return part


def test_greedy_tokens_equal_those_of_the_text_part(tmp_path: Path) -> None:
    expected = oracle(save(tmp_path, SCOUT), make_prompts())
    assert len({tuple(answer) for (answer,) in expected}) > 1
    assert check(str(tmp_path), SETTING, expected, model_impl="auto").num_recomputed


@pytest.mark.parametrize(("fields", "served"), [({}, CHUNK), ({"floor_scale": 16}, 15), ({"floor_scale": 1}, 1)])
def test_contexts_end_where_chunks_or_scales_begin(fields: dict[str, Any], served: int, tmp_path: Path) -> None:
    save(tmp_path, SCOUT | fields)
    assert read_shape(load_hf_config(tmp_path), "auto").max_position_embeddings == served
    with pytest.raises(ConfigError, match=f"max_model_len={served + 1} exceeds the model's {served} positions"):
        make_llm(str(tmp_path), num_blocks=8, max_model_len=served + 1)


def test_a_size_of_chunks_that_is_no_number_is_refused(tmp_path: Path) -> None:
    save(tmp_path, SCOUT)
    config = load_hf_config(tmp_path)
    config.attention_chunk_size = None
    with pytest.raises(ModelLoadError, match="attention_chunk_size=None"):
        read_shape(config, "auto")


def test_a_dense_relative_has_all_its_positions(tmp_path: Path) -> None:
    """As MobileLLM-R1 is published: without experts, chunks and scales."""
    dense = {"moe_layers": [], "interleave_moe_layer_step": 0, "attn_temperature_tuning": False, "num_local_experts": 0}
    dense |= {"layer_types": ["full_attention"] * 2, "attention_chunk_size": 8, "tie_word_embeddings": True}
    model = build_model("Llama4ForCausalLM", **dense)
    save_checkpoint(model, tmp_path)
    assert read_shape(load_hf_config(tmp_path), "auto").max_position_embeddings == 128
    expected = oracle(model, make_prompts())
    check(str(tmp_path), SETTING, expected, model_impl="auto")
