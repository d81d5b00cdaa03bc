"""plain_config reads what transformers would, or nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from engine.errors import ModelLoadError
from engine.models.config.families.table import ARCHITECTURES
from engine.models.config.families.transformers_defaults import FAMILIES
from engine.models.config.files.generation_defaults import GenerationDefaults
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.files.without_transformers import plain_config
from engine.models.config.model_config import ModelConfig
from engine.models.decoder.rope import rope_tables
from tests.engine.checkpoints import EXPERT_FAMILIES, build_model
from tests.engine.conftest import SavedModel
from tests.engine.models.config.files.published_configs import PUBLISHED, QWEN3
from tests.engine.models.decoder.dense_families import DENSE_FAMILIES, build_dense_model

EXTRA = {"rope_parameters", "dtype", "layer_types", "mlp_bias", "partial_rotary_factor", "auto_map", "num_labels"}
EXTRA |= {"num_local_experts", "use_bidirectional_attention", "hidden_activation", "qkv_bias"}
NAMES = sorted({name for raw in PUBLISHED for name in raw} | EXTRA)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 64),
    st.floats(-1, 2),
    st.just([]),
    st.just(["full_attention"] * 28),
    st.just(["sliding_attention"] * 24),
    st.just(["sliding_attention", "full_attention"] * 13),
    st.just({"rope_type": "default", "rope_theta": 10000.0}),
    st.just({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    st.just({"rope_theta": 7}),
    st.just({"rope_theta": 7, "partial_rotary_factor": 0.25}),
    st.just({"full_attention": {"rope_theta": 7}, "sliding_attention": {"rope_theta": 9.0}}),
    st.just({"full_attention": {"rope_theta": 7}}),
    st.just({}),
    st.sampled_from(
        [
            "silu",
            "gelu",
            "float16",
            "int8",
            "bfloat16",
            "llama",
            "qwen2",
            "qwen3",
            "mistral",
            "gemma",
            "gelu_pytorch_tanh",
        ]
    ),
)


def understood(config: Any) -> Any:
    """Return all that the engine takes from a config, or why it refuses it."""
    try:
        model = ModelConfig.from_hf(config)
    except ModelLoadError as error:
        return str(error)
    rope = rope_tables(config, model.rope, model.rope_widths, 3) if model.head_dim > 1 else []
    model = replace(model, dtype=model.dtype or torch.float32)  # only a saved config names one
    return model, [table.tolist() for table in rope], config.eos_token_id, config.vocab_size


def test_every_family_of_our_own_decoder_is_known() -> None:
    plain = {
        name
        for name, family in ARCHITECTURES.items()
        if not (family.recurrent or family.has_layer_heads or family.has_latents or family.has_chunks)
    }
    assert {family.architecture for family in FAMILIES.values()} == plain
    assert {raw["model_type"] for raw in PUBLISHED} == set(FAMILIES)


@pytest.mark.parametrize("raw", PUBLISHED, ids=lambda raw: str(raw["model_type"]))
def test_published_configs_are_plain_and_read_as_transformers_reads_them(raw: dict[str, Any]) -> None:
    plain = plain_config(raw)
    assert plain is not None
    assert understood(plain) == understood(CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw)))


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(PUBLISHED), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3), st.data())
def test_whatever_is_plain_means_to_transformers_what_it_means_here(
    base: dict[str, Any], changes: dict[str, Any], data: st.DataObject
) -> None:
    raw = base | changes
    for name in data.draw(st.lists(st.sampled_from(NAMES), max_size=2)):
        raw.pop(name, None)
    plain = plain_config(raw)
    if plain is None:
        return
    try:
        config = CONFIG_MAPPING[raw["model_type"]].from_dict(json.loads(json.dumps(raw)))
    except (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        pytest.fail(f"transformers refuses what was taken for plain: {error}")
    assert understood(plain) == understood(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
        {"use_sliding_window": True},
        {"hidden_size": "1024"},
        {"unheard_of": 1},
        {"model_type": "olmo"},
        {"torch_dtype": "float64"},
        {"layer_types": ["full_attention"]},
    ],
)
def test_whatever_is_not_plain_is_left_to_transformers(changes: dict[str, Any]) -> None:
    assert plain_config(QWEN3 | changes) is None


def test_what_transformers_saves_today_is_plain(qwen3: SavedModel) -> None:
    raw = json.loads((Path(qwen3.path) / "config.json").read_text())
    assert plain_config(raw) is not None
    config = load_hf_config(qwen3.path)
    assert understood(config) == understood(qwen3.model.config)
    assert GenerationDefaults.load(qwen3.path, config).eos_token_ids == (2,)
    assert config.dtype is torch.float32


SCALED = {"phi4-mini", "olmo3", "gemma3-4b", "smollm3-windows"}  # or with windows that a switch turns on


@pytest.mark.parametrize("name", sorted({*DENSE_FAMILIES, *EXPERT_FAMILIES} - SCALED))
def test_what_transformers_saves_today_of_any_family_is_plain(name: str) -> None:
    model = build_dense_model(name) if name in DENSE_FAMILIES else build_model(name)
    raw = json.loads(model.config.to_json_string())
    plain = plain_config(raw | {"dtype": "float32"})
    assert plain is not None
    assert understood(plain) == understood(model.config)


def test_an_engine_starts_without_what_it_does_not_need(qwen3: SavedModel) -> None:
    """Each of these takes a part of a second, torch's compiler more than one."""
    unwanted = ["ray", "torch._dynamo", "torch._inductor", "sympy", "triton", "llguidance"]
    unwanted += ["transformers", "tokenizers", "huggingface_hub", "jinja2"]
    script = f"""
import sys
from engine.llm import LLM
from engine.sampling_params import SamplingParams
assert "torch" not in sys.modules and "transformers" not in sys.modules
llm = LLM({qwen3.path!r}, device="cpu", num_blocks=8, skip_tokenizer_init=True)
llm.generate({{"prompt_token_ids": [5, 6]}}, SamplingParams(max_tokens=2), use_tqdm=False)
print(*(name for name in {unwanted!r} if name in sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split() == []
