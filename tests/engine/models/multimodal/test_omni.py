"""The text part of models that also speak: the thinker of Qwen2.5-Omni and Qwen3-Omni."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, PreTrainedModel

from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.config.files.generation_defaults import GenerationDefaults
from engine.models.config.files.hf_config import load_hf_config
from tests.engine.models.adapter.greedy_answers import check, make_prompts, oracle
from tests.engine.models.multimodal.tiny_checkpoints import COMPARED_APART
from tests.engine.models.multimodal.tiny_multimodal import EXPERTS, IMAGE_TOKENS, QWEN_VISION, TEXT

AUDIO = {"num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": 16}
AUDIO |= {"max_source_positions": 16, "output_dim": 64, "n_window": 4}
ROPE = {"mrope_section": [4, 2, 2], "rope_type": "default"}
TOKENS = IMAGE_TOKENS | {"audio_token_id": 115, "audio_start_token_id": 116, "audio_end_token_id": 117}
TOKENS |= {"position_id_per_seconds": 13, "seconds_per_chunk": 2, "user_token_id": 114}
# By the names in COMPARED_APART: the model type, the fields of the text part, and those of the vision tower.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen2.5-Omni-3B, Qwen2.5-Omni-7B": (
        "qwen2_5_omni",
        TEXT | {"model_type": "qwen2_5_omni_text", "rope_scaling": ROPE, "rope_theta": 1e5},
        QWEN_VISION | {"fullatt_block_indexes": [0]},
    ),
    "Qwen3-Omni-30B-A3B-Instruct, Qwen3-Omni-30B-A3B-Thinking": (
        "qwen3_omni_moe",
        TEXT
        | EXPERTS
        | {"model_type": "qwen3_omni_moe_text", "head_dim": 16, "rope_theta": 1e5}
        | {"rope_scaling": ROPE | {"interleaved": True, "mrope_interleaved": True}},
        QWEN_VISION | {"deepstack_visual_indexes": [0]},
    ),
}


def build(model_type: str, thinker: dict[str, Any], architecture: str) -> PreTrainedModel:
    """Return a random thinker, the part that reads everything and writes text."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[f"{model_type}_thinker"].from_dict(thinker)
    name = architecture.replace("ForCond", "ThinkerForCond")
    model: PreTrainedModel = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for weight_name, parameter in model.named_parameters():
            if parameter.dim() == 1 and weight_name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.2)
    return model


@pytest.mark.parametrize("published", KINDS)
def test_greedy_tokens_equal_those_of_the_thinker(published: str, tmp_path: Path) -> None:
    model_type, text, vision = KINDS[published]
    architecture, text_type = COMPARED_APART[published]
    assert text_type == text["model_type"]
    thinker = {"text_config": text, "vision_config": vision, "audio_config": AUDIO} | TOKENS
    model = build(model_type, thinker, architecture)
    model.save_pretrained(tmp_path / "thinker", save_original_format=True)
    with open_checkpoint(tmp_path / "thinker") as checkpoint:
        weights = {f"thinker.{name}": checkpoint.read(name).clone() for name in checkpoint.names}
    for name in ("talker.model.layers.0.mlp.up_proj", "code2wav.decoder.0.conv", "token2wav.code2wav_dit_model.proj"):
        weights[f"{name}.weight"] = torch.zeros(2)
    path = tmp_path / "whole"
    path.mkdir()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    published_as = "Qwen2_5OmniModel" if model_type == "qwen2_5_omni" else architecture
    fields = {"architectures": [published_as], "model_type": model_type, "dtype": "float32", "thinker_config": thinker}
    (path / "config.json").write_text(json.dumps(fields | {"enable_audio_output": False}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    assert any(".visual." in name for name in weights)
    expected = oracle(model, make_prompts())
    assert len({tuple(answer) for (answer,) in expected}) > 1
    for model_impl in ("auto", "transformers"):
        assert check(str(path), (4, 7, True, 0.0), expected, model_impl=model_impl).num_recomputed
    assert GenerationDefaults.load(path, load_hf_config(path)).eos_token_ids == (2, 3)
