"""The fields of the published models are read: chunks, layers without positions, experts, and what queries grow by."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from engine.models.config.shapes.query_growth import QueryGrowth
from kernels.attention.window import Chunk
from tests.engine.models.decoder.llama4.llama4_models import CHUNK, save_llama4_model
from tests.engine.oracle import make_llm

# What config.json of Scout 17B-16E and of Maverick 17B-128E has, but for what no decoder reads.
SHARED: dict[str, Any] = {
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "model_type": "llama4_text",
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 202048,
}
SCOUT = SHARED | {
    "interleave_moe_layer_step": 1,
    "max_position_embeddings": 10485760,
    "num_local_experts": 16,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "use_qk_norm": True,
}
MAVERICK = SHARED | {
    "interleave_moe_layer_step": 2,
    "max_position_embeddings": 1048576,
    "num_local_experts": 128,
    "rope_scaling": None,
    "use_qk_norm": False,
}


@pytest.mark.parametrize(
    ("fields", "num_experts", "with_experts", "qk_norm"),
    [(SCOUT, 16, range(48), "unit"), (MAVERICK, 128, range(1, 48, 2), "none")],
    ids=["Scout", "Maverick"],
)
def test_published_fields_are_read(
    fields: dict[str, Any], num_experts: int, with_experts: range, qk_norm: str, tmp_path: Path
) -> None:
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": fields}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"torch_dtype": "bfloat16"}))
    model = ModelConfig.from_hf(load_hf_config(tmp_path))
    attends_to_all = range(3, 48, 4)
    assert model.windows == tuple(None if layer in attends_to_all else Chunk(8192) for layer in range(48))
    assert model.rope.tables == tuple(None if layer in attends_to_all else 0 for layer in range(48))
    assert model.query_growth == QueryGrowth(beta=0.1, length=8192, first=1)
    assert (model.intermediate_size, model.qk_norm) == (16384, qk_norm)
    assert model.experts is not None
    assert (model.experts.num_experts, model.experts.layers) == (num_experts, frozenset(with_experts))
    assert (model.experts.experts_per_token, model.experts.intermediate_size) == (1, 8192)


def test_the_log_says_how_many_pages_chunks_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, path = save_llama4_model("llama-4-scout", tmp_path)
    with caplog.at_level(logging.INFO, logger="engine"):
        make_llm(path, block_size=4)
    (line,) = [message for message in caplog.messages if message.startswith("Layers with ")]
    assert line.startswith(f"Layers with chunks of {CHUNK} tokens: ")
