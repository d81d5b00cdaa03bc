"""What Gemma 3n's config says of residual streams, widths and cut-offs, as it is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import UnsupportedModelError
from engine.kv.layer_cache import KeyValue, SharedWith
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from engine.models.config.shapes.altup import AltUpShape

# fmt: off
GEMMA_3N_E4B: dict[str, Any] = {
    "architectures": ["Gemma3nForConditionalGeneration"], "dtype": "bfloat16", "eos_token_id": [1, 106],
    "model_type": "gemma3n",
    "text_config": {
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25, "altup_active_idx": 0, "altup_coef_clip": 120.0,
        "altup_correct_scale": True, "altup_num_inputs": 4, "attention_bias": False, "final_logit_softcapping": 30.0,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048,
        "hidden_size_per_layer_input": 256, "intermediate_size": [16384] * 35, "laurel_rank": 64,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "max_position_embeddings": 32768,
        "model_type": "gemma3n_text", "num_attention_heads": 8, "num_hidden_layers": 35, "num_key_value_heads": 2,
        "num_kv_shared_layers": 15, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0,
        "sliding_window": 512, "vocab_size": 262400, "vocab_size_per_layer_input": 262144,
    },
}
# fmt: on


def read(path: Path, **changes: Any) -> ModelConfig:
    fields = GEMMA_3N_E4B | {"text_config": GEMMA_3N_E4B["text_config"] | changes}
    (path / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_hf(load_hf_config(path))


def test_gemma_3n_as_it_is_published(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.altup == AltUpShape(num_streams=4, active=0, scales_output=True, laurel_rank=64)
    full, sliding = KeyValue(2, 256, 256), KeyValue(2, 256, 256, 512)
    assert config.layer_caches[:20] == (*[sliding] * 4, full) * 4
    assert config.layer_caches[20:] == (*[SharedWith(18)] * 4, SharedWith(19)) * 3
    assert (config.attention_scale, config.logits_softcap, config.normalizes_values) == (1.0, 30.0, True)
    assert (config.per_layer_width, config.per_layer_vocab_size) == (256, 262144)
    assert config.gate_cutoffs == dict.fromkeys(range(10), pytest.approx(1.6448536))
    assert (config.intermediate_size, config.intermediate_sizes) == (16384, {})


def test_layers_may_have_any_widths(tmp_path: Path) -> None:
    config = read(tmp_path, intermediate_size=[8192] * 10 + [16384] * 25)
    assert [config.intermediate_size_of(layer) for layer in (0, 9, 10, 34)] == [8192, 8192, 16384, 16384]


def test_ranks_do_not_share_it(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="compare gates with the mean of all of them; set it to 1"):
        read(tmp_path).shard(2)
