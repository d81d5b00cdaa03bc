"""Hostile values in config.json: each serves, or fails with an error that names the key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelLoadError
from tests.engine.checkpoints import build_model
from tests.engine.models.damaged_checkpoints import Workshop, generate

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    made = Workshop(tmp_path_factory.mktemp("workshop"))
    yield made
    assert generate(made.single) == made.tokens


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
FIELDS = st.sampled_from(
    sorted({*json.loads(build_model("qwen3").config.to_json_string(use_diff=False)), "num_labels", "rope_scaling"})
)


@settings(max_examples=400, deadline=None)
@given(field=FIELDS, value=HOSTILE | JSON)
def test_a_hostile_config(workshop: Workshop, field: str, value: Any) -> None:
    def damage(copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {field: value}))

    workshop.try_damaged(workshop.single, damage)


@settings(max_examples=150, deadline=None)
@given(
    field=st.sampled_from(["rope_type", "rope_theta", "factor", "low_freq_factor", "original_max_position_embeddings"]),
    rope_type=st.sampled_from(["default", "linear", "llama3", "yarn", "dynamic", "longrope"]),
    value=HOSTILE | JSON,
)
def test_hostile_rope_parameters(workshop: Workshop, field: str, rope_type: str, value: Any) -> None:
    rope = {
        "rope_type": rope_type,
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }

    def damage(copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"rope_parameters": rope | {field: value}}))

    workshop.try_damaged(workshop.single, damage)


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
        ({"architectures": 5}, "architectures=5 is not a list of names"),
    ],
)
def test_a_hostile_value_is_named(workshop: Workshop, changes: dict[str, Any], problem: str) -> None:
    def damage(copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | changes))

    error = workshop.try_damaged(workshop.single, damage)
    assert isinstance(error, ModelLoadError)
    assert problem in str(error)


def test_a_context_too_long_for_its_rope_table_is_a_config_error(workshop: Workshop) -> None:
    def damage(copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**9}))

    error = workshop.try_damaged(workshop.single, damage)
    assert "max_model_len=1000000000 takes 128 GB for the angles of RoPE; set 33554432 or less" in str(error)


def test_nested_json_is_refused(workshop: Workshop) -> None:
    for name in ("config.json", "generation_config.json"):
        deep = "[" * 200_000
        error = workshop.try_damaged(workshop.single, lambda copy: (copy / name).write_text(deep) and None)  # noqa: B023
        assert "not valid JSON" in str(error)
