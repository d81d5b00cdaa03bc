"""Hostile values in config.json: each serves, or fails with an error that names the key."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from engine.errors import ModelLoadError, PagodaError, PromptTooLongError
from engine.models.config.values.limits import require_plausible
from tests.engine.models.adapter.tiny_models import TINY_MODELS
from tests.engine.models.checkpoint.damaged_checkpoints import Workshop, generate, little_memory

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


FAMILIES = ["qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "gemma2", "smollm3", "granite"]
FAMILIES += ["gemma-4-e4b", "gemma-3n-e4b", "mistral-4", "glm-5.2", "qwen3-next", "nemotron-3-super", "falcon-h1"]
FAMILIES += ["CohereForCausalLM", "Glm4MoeForCausalLM"]  # which transformers' modules compute
Workshops = Callable[[str], Workshop]


@pytest.fixture(scope="module")
def workshops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshops]:
    """Return a function from a family to its workshop."""
    by_name: dict[str, Workshop] = {}

    def get(name: str) -> Workshop:
        if name not in by_name:
            by_name[name] = Workshop(tmp_path_factory.mktemp(name), name)
        return by_name[name]

    yield get
    for workshop in by_name.values():
        assert generate(workshop.single, workshop.model_impl) == workshop.tokens


@pytest.fixture(scope="module")
def workshop(workshops: Workshops) -> Workshop:
    return workshops("qwen3")


def try_changes(workshop: Workshop, changes: dict[str, Any]) -> PagodaError | None:
    """Return the error of a checkpoint with other values in its config.json, or None if it serves."""

    def damage(copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | changes))

    return workshop.try_damaged(workshop.single, damage)


HOSTILE = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        -1,
        1,
        3,
        1.5,
        10**9,
        2**31,
        2**63,
        10**400,
        1e308,
        -1e-09,
        1e-300,
        "",
        "6",
        "x" * 10000,
        float("nan"),
        float("inf"),
        [],
        [[]],
        {},
        [None],
        {"a": {}},
        [2],
        ["x"],
        [2**70],
    ]
)


def try_a_field(workshop: Workshop, data: st.DataObject) -> None:
    """Set one of the fields that the family's config has, or one that any may have, to anything."""
    field = data.draw(st.sampled_from([*workshop.fields, "num_labels", "rope_scaling"]), label="field")
    try_changes(workshop, {field: data.draw(HOSTILE | JSON, label="value")})


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_a_hostile_config(workshops: Workshops, name: str, data: st.DataObject) -> None:
    try_a_field(workshops(name), data)


@pytest.mark.exhaustive("more random values; make test tries five for each family")
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_many_hostile_configs(workshops: Workshops, name: str, data: st.DataObject) -> None:
    try_a_field(workshops(name), data)


def test_a_context_without_room_for_the_prompt_is_no_wrong_config(workshop: Workshop) -> None:
    assert isinstance(try_changes(workshop, {"max_position_embeddings": 1}), PromptTooLongError)


ROPE_FIELDS = ["rope_type", "rope_theta", "factor", "low_freq_factor", "original_max_position_embeddings"]
ROPE_TYPES = ["default", "linear", "llama3", "yarn", "dynamic", "longrope"]
ROPE = {
    "field": st.sampled_from(ROPE_FIELDS),
    "rope_type": st.sampled_from(ROPE_TYPES),
    "value": HOSTILE | JSON,
}


@settings(max_examples=12, deadline=None)
@given(**ROPE)
def test_hostile_rope_parameters(workshop: Workshop, field: str, rope_type: str, value: Any) -> None:
    try_rope(workshop, rope_type, field, value)


@pytest.mark.exhaustive("more random values; make test tries twelve")
@settings(max_examples=250, deadline=None)
@given(**ROPE)
def test_many_hostile_rope_parameters(workshop: Workshop, field: str, rope_type: str, value: Any) -> None:
    try_rope(workshop, rope_type, field, value)


def try_rope(workshop: Workshop, rope_type: str, field: str, value: Any) -> None:
    rope = {
        "rope_type": rope_type,
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    try_changes(workshop, {"rope_parameters": rope | {field: value}})


@pytest.mark.parametrize("name", ["qwen3", "phi3"])  # of which transformers' modules compute the first, with LongRoPE
def test_a_wrong_length_of_longrope_is_named(workshops: Workshops, name: str) -> None:
    workshop = workshops(name)
    config = json.loads((workshop.single / "config.json").read_text())
    rope = config["rope_parameters"] | {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
    for length in (None, "x", [], 0, -1, 1.5):
        field = {"original_max_position_embeddings": length}
        error = try_changes(workshop, {"rope_parameters": rope | field} | field)
        assert isinstance(error, ModelLoadError), length
        assert "original_max_position_embeddings" in str(error)


def test_a_wrong_share_of_rotated_elements_is_named(workshops: Workshops) -> None:
    workshop = workshops("glm4")
    config = json.loads((workshop.single / "config.json").read_text())
    for share in ([], "x", 0, -0.5, 1.5):
        error = try_changes(workshop, {"rope_parameters": config["rope_parameters"] | {"partial_rotary_factor": share}})
        assert isinstance(error, ModelLoadError), share
        assert "partial_rotary_factor" in str(error)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is not an integer from 1 to 512"),
        ({"hidden_size": -96}, "hidden_size=-96 is not an integer from 1"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4 is not a divisor of num_attention_heads=6"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' is not true or false"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is not a small number"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_parameters.rope_theta=-1.0 is not a positive number"),
        ({"torch_dtype": "int8"}, "torch_dtype='int8' is not one of bfloat16"),
        ({"dtype": "auto"}, "dtype='auto' is not one of bfloat16"),
        ({"dtype": "torch.bfloat16"}, "dtype='torch.bfloat16' is not one of bfloat16"),
        ({"architectures": 5}, "architectures=5 is not a list of names"),
    ],
)
def test_a_hostile_value_is_named(workshop: Workshop, changes: dict[str, Any], problem: str) -> None:
    error = try_changes(workshop, changes)
    assert isinstance(error, ModelLoadError)
    assert problem in str(error)


NAN = float("nan")
OF_FAMILIES: list[tuple[str, str, list[Any]]] = [
    ("qwen3_moe", "decoder_sparse_step", [0, None, "x"]),
    ("qwen3_moe", "moe_intermediate_size", [-1, 0, 1.5, 2**63, None, "x", []]),
    ("qwen3_moe", "num_experts", [None, "x", [], NAN, -1, 10_000, 10**9]),
    ("qwen3_moe", "num_experts_per_tok", [0, None, 9, "x"]),
    ("qwen3_moe", "mlp_only_layers", [5, ["x"]]),
    ("qwen2_moe", "shared_expert_intermediate_size", [-1, None, 2**63]),
    ("qwen2_moe", "num_key_value_heads", [None]),
    ("mixtral", "num_local_experts", [None, "x", [], NAN, 10**9]),
    ("mixtral", "hidden_size", [3]),
    ("gemma2", "query_pre_attn_scalar", [0, -1, NAN]),
    ("gemma2", "attn_logit_softcapping", [0.0, NAN, -1.0, 1e308]),
    ("gemma2", "final_logit_softcapping", [0.0, NAN, -1.0]),
    ("gemma-4-e4b", "num_kv_shared_layers", [-1, None, 7, 10**9, "x"]),
    ("gemma-4-e4b", "hidden_size_per_layer_input", [-8, 10**9, "x"]),
    ("gemma-4-e4b", "vocab_size_per_layer_input", [1, 10**9]),
    ("gemma-4-e4b", "hidden_activation", ["silu", "x"]),
    ("gemma-4-e4b", "per_layer_config", [{"9": {}}, {"0": {"hidden_size": 8}}]),
    ("gemma-3n-e4b", "altup_num_inputs", [0, 17, 10**9, None, "x"]),
    ("gemma-3n-e4b", "altup_active_idx", [-1, 4, None, "x"]),
    ("gemma-3n-e4b", "laurel_rank", [0, -1, 10**9, None, "x"]),
    ("gemma-3n-e4b", "activation_sparsity_pattern", [[0.5], [1.0] * 6, [NAN] * 6, [-0.5] * 6, ["x"] * 6]),
    ("gemma-3n-e4b", "intermediate_size", [[96] * 5, [0] * 6, ["x"] * 6, [10**9] * 6]),
    ("gemma-3n-e4b", "vocab_size_per_layer_input", [0, -1, 10**9, None]),
    ("gemma-3n-e4b", "num_kv_shared_layers", [-1, None, 5, 10**9]),
    ("gemma-4-26b-a4b", "top_k_experts", [0, None, 7, "x"]),
    ("gemma-4-26b-a4b", "num_experts", [None, 10**9, "x"]),
    ("smollm3", "no_rope_layers", [[], [1], ["x", 1]]),
    ("granite", "attention_multiplier", [NAN, 0, -1.0]),
    ("granite", "embedding_multiplier", [NAN, float("inf")]),
    ("granite", "residual_multiplier", [NAN]),
    ("granite", "logits_scaling", [0, NAN]),
    ("lfm2-moe", "layer_types", [None, ["conv"] * 5, ["conv", "full_attention", "conv", "x"]]),
    ("lfm2-moe", "conv_L_cache", [0, 1, None, 10**9]),
    ("qwen3-next", "linear_num_key_heads", [0, 3, None, 10**9]),
    ("qwen3-next", "linear_conv_kernel_dim", [0, 1, "x"]),
    ("granite-4-h-moe", "residual_multiplier", [None, NAN, 0]),
    ("granite-4-h-moe", "mamba_n_groups", [0, 3, 10**9]),
    ("falcon-h1", "ssm_multipliers", [[], [1.0] * 4, [NAN] * 5, ["x"] * 5]),
    ("falcon-h1", "key_multiplier", [None, NAN, float("inf")]),
    ("nemotron-3-super", "n_group", [3]),
    ("nemotron-3-super", "moe_latent_size", [0, -1, "x"]),
    ("mamba2", "time_step_limit", [[], [0.5], [0.9, 0.5], [NAN, 1.0]]),
    ("mamba2", "state_size", [0, None, 10**9]),
    ("CohereForCausalLM", "logit_scale", [NAN, 0]),
    ("CohereForCausalLM", "layer_norm_eps", [NAN]),
    ("Glm4MoeForCausalLM", "n_group", [0, 10**9]),
    ("Glm4MoeForCausalLM", "routed_scaling_factor", [NAN, float("inf")]),
    ("Glm4MoeForCausalLM", "n_routed_experts", [10**9]),
    ("AriaTextForCausalLM", "moe_num_experts", [0, -1, 10**9]),
    ("GPT2LMHeadModel", "n_layer", [0, 10**9]),
    ("GPT2LMHeadModel", "n_positions", [0, -1, 10**400]),
    ("DbrxForCausalLM", "max_seq_len", [0, -1, 10**400]),
]


@pytest.mark.parametrize(("name", "field", "values"), OF_FAMILIES, ids=lambda value: str(value)[:30])
def test_a_hostile_value_of_a_family_is_named(workshops: Workshops, name: str, field: str, values: list[Any]) -> None:
    for value in values:
        error = try_changes(workshops(name), {field: value})
        assert isinstance(error, ModelLoadError), value
        assert field in str(error)


@pytest.mark.parametrize("model_type", sorted({tiny.model_type for tiny in TINY_MODELS.values()}))
def test_no_limit_refuses_what_is_usual(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()  # as large as the family's first model
    require_plausible(json.loads(config.to_json_string(use_diff=False)), model_type)


def test_an_architecture_that_is_not_served_is_refused_for_that_and_not_for_its_sizes(workshop: Workshop) -> None:
    error = try_changes(workshop, {"architectures": ["DogeForCausalLM"], "num_experts": 16_384})  # as published
    assert isinstance(error, ModelLoadError)
    assert "'DogeForCausalLM' is not supported: its attention masks are its own" in str(error)


def test_a_context_of_null_is_named_as_transformers_names_it(workshops: Workshops) -> None:
    error = try_changes(workshops("DbrxForCausalLM"), {"max_seq_len": None})
    assert "max_position_embeddings=None is not an integer from 1; correct config.json" in str(error)


def test_logits_that_cannot_be_computed_fail_at_the_start(workshops: Workshops) -> None:
    error = try_changes(workshops("CohereForCausalLM"), {"logit_scale": None})
    assert "its modules could not compute a few tokens: unsupported operand" in str(error)


@pytest.mark.parametrize("changes", [{"rope_theta": 1e-300}, {"factor": 2**63}])
def test_angles_that_are_no_numbers_fail_at_the_start(workshop: Workshop, changes: dict[str, Any]) -> None:
    """transformers' modules compute this kind of RoPE."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
    error = try_changes(workshop, {"rope_parameters": rope | changes})
    assert "the logits of a few tokens are not numbers" in str(error)


@pytest.mark.parametrize(
    ("name", "field", "tensor"),
    [
        ("qwen3_moe", "num_local_experts", "mlp.gate.weight"),
        pytest.param("mixtral", "num_local_experts", "gate.weight", marks=pytest.mark.long),
        ("Glm4MoeForCausalLM", "n_routed_experts", "mlp."),
        pytest.param("AriaTextForCausalLM", "moe_num_shared_experts", "mlp.shared_experts.", marks=pytest.mark.long),
    ],
)
def test_more_experts_than_are_stored_are_refused_by_the_headers(
    workshops: Workshops, name: str, field: str, tensor: str
) -> None:
    error = try_changes(workshops(name), {field: 4000})
    assert isinstance(error, ModelLoadError)
    assert tensor in str(error)


WIDE = {"hidden_size": 2**18, "num_attention_heads": 4096, "num_key_value_heads": 4096, "head_dim": 64}
WIDE |= {"intermediate_size": 2**20}
EMBEDDING = "model.embed_tokens.weight"
UNSTORED: list[tuple[str, dict[str, int], str]] = [
    ("qwen3", WIDE, EMBEDDING),
    ("qwen3", {"vocab_size": 2**24}, EMBEDDING),
    ("qwen3", {"max_position_embeddings": 2**24, "intermediate_size": 208}, "model.layers.0.mlp.gate_proj.weight"),
    ("mixtral", {"num_local_experts": 4000, "intermediate_size": 2**20}, "model.layers.0.block_sparse_moe.gate.weight"),
    ("qwen3-next", {"num_attention_heads": 4096, "head_dim": 8192}, "model.layers.2.self_attn.q_proj.weight"),
    ("gemma-3n-e4b", {"hidden_size": 2**18, "laurel_rank": 2**18}, EMBEDDING),
    ("CohereForCausalLM", WIDE | {"vocab_size": 2**24}, "model.embed_tokens.weight"),
]


@pytest.mark.parametrize(("name", "changes", "tensor"), UNSTORED, ids=lambda value: str(value)[:40])
def test_no_memory_is_taken_for_sizes_that_the_files_do_not_have(
    workshops: Workshops, name: str, changes: dict[str, int], tensor: str
) -> None:
    workshop = workshops(name)
    with little_memory():
        error = try_changes(workshop, changes)
    assert isinstance(error, ModelLoadError)
    assert re.search(rf"'{tensor}' of '.*/model.safetensors' has shape \[\d.*\](, but its| instead of) ", str(error))


def test_options_of_experts_that_a_mixtral_does_not_have_change_nothing(workshops: Workshops) -> None:
    without_effect = {"moe_intermediate_size": 7, "norm_topk_prob": False, "mlp_only_layers": [0]}
    without_effect["decoder_sparse_step"] = 2
    workshop, answers = workshops("mixtral"), []

    def damage(copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | without_effect))
        answers.append(generate(copy))

    assert workshop.try_damaged(workshop.single, damage) is None
    assert answers == [workshop.tokens]


def test_a_context_too_long_for_its_rope_table_is_a_config_error(workshop: Workshop) -> None:
    error = try_changes(workshop, {"max_position_embeddings": 10**9})
    assert "max_model_len=1000000000 takes 128 GB for the angles of RoPE; set 33554432 or less" in str(error)


def test_nested_json_is_refused(workshop: Workshop) -> None:
    for name in ("config.json", "generation_config.json"):
        deep = "[" * 200_000
        error = workshop.try_damaged(workshop.single, lambda copy: (copy / name).write_text(deep) and None)  # noqa: B023
        assert "not valid JSON" in str(error)
