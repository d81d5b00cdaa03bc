"""How long a context may be where RoPE is scaled: the factor times the original positions, as vLLM serves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.llm import LLM
from engine.models.config.files.config_json import num_positions, rope_of
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.implementation import read_shape
from engine.sampling_params import SamplingParams
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.models.adapter import tiny_models

YARN = {"rope_type": "yarn", "factor": 4.0}
LINEAR_FROM_32K = {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (YARN, 4 * 40_960),
        (YARN | {"original_max_position_embeddings": 32_768}, 131_072),  # as the cards of Qwen3 say
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 32_768}, 131_072),  # its name until 2024
        ({"rope_type": "linear", "factor": 2.0}, 81_920),
        (YARN | {"original_max_position_embeddings": 4096}, 40_960),  # max_position_embeddings is scaled already
        (YARN | {"factor": 0.5}, 40_960),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 40_960),
        ({"rope_type": "dynamic", "factor": 4.0}, 40_960),
        ({"full_attention": {"rope_type": "linear", "factor": 8.0}}, 40_960),  # Gemma 3's are scaled already
        ({"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}, 163_840),
        ({"full_attention": LINEAR_FROM_32K, "sliding_attention": None}, 65_536),
        ({"full_attention": YARN | {"original_max_position_embeddings": 4096}}, 40_960),
        (YARN | {"factor": "4"}, 40_960),
        (YARN | {"factor": True}, 40_960),
        (YARN | {"factor": float("inf")}, 40_960),
        (YARN | {"original_max_position_embeddings": "x"}, 40_960),
        ("yarn", 40_960),
        (None, 40_960),
    ],
    ids=str,
)
def test_the_number_of_positions(rope: object, expected: int) -> None:
    assert num_positions(40_960, rope) == expected


@pytest.mark.parametrize(
    ("architecture", "longest"),
    [("Gemma3ForCausalLM", 131_072), ("LlamaForCausalLM", 1_048_576), ("Unknown", 1_048_576)],
)
def test_the_launcher_knows_which_families_name_the_scaled_number(architecture: str, longest: int) -> None:
    raw = {"architectures": [architecture], "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert num_positions(131_072, rope_of(raw)) == longest


@pytest.mark.parametrize("rope", [YARN, {"full_attention": YARN}], ids=str)
@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Olmo3ForCausalLM", "Qwen3ForCausalLM"])
def test_a_scaling_that_is_added_to_a_config_counts_beside_the_parameters_in_it(
    architecture: str, rope: dict[str, Any]
) -> None:
    """transformers writes rope_parameters since version 5; cards tell users to add rope_scaling, which comes first."""
    raw = {"architectures": [architecture], "rope_parameters": {"rope_type": "default"}, "rope_scaling": rope}
    assert num_positions(32_768, rope_of(raw)) == 131_072


THETA = {"rope_theta": 10000.0}
SCALED = [
    ("llama", "pagoda", YARN | {"original_max_position_embeddings": 64}),
    ("qwen3", "pagoda", YARN),
    ("llama", "pagoda", {"rope_type": "linear", "factor": 4.0}),
    ("Olmo2ForCausalLM", "transformers", {"rope_type": "linear", "factor": 4.0}),
    (
        "Olmo3ForCausalLM",
        "pagoda",
        {"full_attention": YARN | THETA, "sliding_attention": {"rope_type": "default"} | THETA},
    ),
]


@pytest.mark.parametrize(("name", "model_impl", "rope"), SCALED)
def test_answers_beyond_the_original_positions_are_those_of_transformers(
    name: str, model_impl: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    options = {"max_position_embeddings": 64, "rope_parameters": rope | ({} if "full_attention" in rope else THETA)}
    build = tiny_models.build_model if name.endswith("LM") else build_model
    model = build(name, **options)
    path = save_checkpoint(model, tmp_path)
    llm = LLM(path, dtype="float32", model_impl=model_impl, num_blocks=64, skip_tokenizer_init=True)
    assert llm.engine.info.max_model_len == 256
    prompt = [5 + i % 50 for i in range(200)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()


def test_more_than_the_scaled_positions_are_refused(tmp_path: Path) -> None:
    path = save_checkpoint(build_model("qwen3", max_position_embeddings=64), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": YARN, "rope_parameters": None}))
    shape = read_shape(load_hf_config(path), "auto")
    assert shape.context_length(256) == 256
    with pytest.raises(ConfigError, match="max_model_len=257 exceeds the model's 256 positions"):
        shape.context_length(257)
