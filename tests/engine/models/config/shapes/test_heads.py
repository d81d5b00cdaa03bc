"""Which heads the layers of Gemma 4 have, and whose keys and values they read, by a published and by wrong configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelLoadError
from engine.kv.layer_cache import KeyValue, SharedWith
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from engine.models.config.shapes.heads import KVHeads
from tests.engine.models.decoder.gemma.gemma_families import build_gemma_model

_TYPES = (["sliding_attention"] * 5 + ["full_attention"]) * 5
# fmt: off
GEMMA4_26B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "dtype": "bfloat16",
    "image_token_id": 258880, "model_type": "gemma4", "tie_word_embeddings": True,
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True, "bos_token_id": 2,
        "dtype": "bfloat16", "enable_moe_block": True, "eos_token_id": 1, "final_logit_softcapping": 30.0,
        "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2816,
        "hidden_size_per_layer_input": 0, "initializer_range": 0.02, "intermediate_size": 2112, "layer_types": _TYPES,
        "max_position_embeddings": 262144, "model_type": "gemma4_text", "moe_intermediate_size": 704,
        "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads": 2, "num_hidden_layers": 30,
        "num_key_value_heads": 8, "num_kv_shared_layers": 0, "pad_token_id": 0, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024, "tie_word_embeddings": True, "top_k_experts": 8,
        "use_bidirectional_attention": "vision", "use_cache": True, "use_double_wide_mlp": False,
        "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision", "num_hidden_layers": 27},
}
# fmt: on


def read(path: Path, fields: dict[str, Any]) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_hf(load_hf_config(path))


def test_gemma_4_as_it_is_published(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA4_26B)
    full, sliding = KeyValue(2, 512, 512), KeyValue(8, 256, 256, 1024)
    assert config.layer_caches == (*[sliding] * 5, full) * 5
    assert config.layer_heads.values_are_keys == {5, 11, 17, 23, 29}
    assert (config.num_heads, config.attention_scale, config.logits_softcap) == (16, 1.0, 30.0)
    assert config.attention_options == {"large_heads"}
    assert (config.rope.layer_types, config.rope_widths) == (("full_attention", "sliding_attention"), [512, 256])
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.experts_per_token) == (128, 8)
    assert all(config.has_dense(layer) and config.has_experts(layer) for layer in range(30))
    own = config.shard(2)
    assert own.layer_caches == (*[KeyValue(4, 256, 256, 1024)] * 5, KeyValue(1, 512, 512)) * 5
    assert config.shard(4).kv_heads(5) == KVHeads(1, 512)  # two ranks have the same head
    assert own.experts is not None
    assert (own.intermediate_size, own.experts.intermediate_size) == (1056, 352)


def test_the_last_layers_read_the_last_earlier_ones_of_their_type(tmp_path: Path) -> None:
    text = GEMMA4_26B["text_config"] | {"enable_moe_block": False, "attention_k_eq_v": False}
    text |= {"num_kv_shared_layers": 13, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 256}
    config = read(tmp_path, GEMMA4_26B | {"text_config": text})
    assert config.layer_caches[15:] == (
        *(KeyValue(8, 256, 256, 1024), KeyValue(8, 256, 256, 1024)),
        *(SharedWith(11) if layer % 6 == 5 else SharedWith(16) for layer in range(17, 30)),
    )
    assert config.kv_heads(5) == KVHeads(8, 512)  # num_global_key_value_heads counts with attention_k_eq_v alone
    assert config.intermediate_size_of(16) == 2112
    assert {config.intermediate_size_of(layer) for layer in range(17, 30)} == {4224}
    assert config.per_layer_width == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_head_dim": 7}, "global_head_dim=7 must be even"),
        ({"global_head_dim": 0}, "global_head_dim=0 is not an integer from 1"),
        ({"num_global_key_value_heads": 3}, "num_global_key_value_heads=3 a divisor of num_attention_heads=4"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers=4 of 4 layers leaves no full_attention layer with keys"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers=3 of 4 layers leaves no full_attention layer with keys"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers=-1 is not an integer from 0"),
        ({"num_kv_shared_layers": 9}, "num_kv_shared_layers=9 of 4 layers leaves no full_attention layer with keys"),
        (
            {"hidden_size_per_layer_input": 8},
            "vocab_size_per_layer_input=262144 is supported only if it is vocab_size=385",
        ),
        ({"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config with hidden_size, which is not supported"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is not supported"),
        ({"enable_moe_block": True}, "num_experts=None is not an integer from 1"),
    ],
)
def test_a_config_that_no_model_has_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    fields = json.loads(build_gemma_model("gemma-4-31b").config.to_json_string(use_diff=False))
    del fields["per_layer_config"]
    heads = {"global_head_dim": 32, "num_global_key_value_heads": 1}
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, fields | heads | changes)
