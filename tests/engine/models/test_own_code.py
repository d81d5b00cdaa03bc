"""Checkpoints that bring code of their own: it is never run, and those that do not need it are served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, ModelLoadError
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.implementation import read_shape
from engine.models.config.model_config import ModelConfig
from engine.models.config.model_shape import ModelShape
from engine.models.config.transformers_config import TransformersConfig
from tests.engine.checkpoints import save_checkpoint
from tests.engine.models.adapter.tiny_models import build_model
from tests.engine.models.checkpoint.damaged_checkpoints import generate
from tests.engine.models.config.files.published_configs import PHI3_5_MINI, PHI3_5_MOE, PHI3_MINI, PHI4_MINI

EVIL = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}


def read(path: Path, config: dict[str, Any]) -> ModelShape:
    (path / "config.json").write_text(json.dumps(config))
    return read_shape(load_hf_config(path), "auto")


@pytest.mark.parametrize(
    ("published", "window", "rotary_dim", "context"),
    [(PHI3_MINI, 2047, 96, 4096), (PHI3_5_MINI, 262144, 96, 131072), (PHI4_MINI, 262144, 96, 131072)],
    ids=lambda value: str(value["_name_or_path"]) if isinstance(value, dict) else str(value),
)
def test_published_phi_models_are_computed_by_our_own_decoder(
    tmp_path: Path,
    published: dict[str, Any],
    window: int,
    rotary_dim: int,
    context: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        shape = read(tmp_path, published)
    assert isinstance(shape, ModelConfig)
    assert f"The code of '{tmp_path}' (auto_map) is not run: Phi3ForCausalLM is computed without it" in caplog.text
    assert shape.windows == (window,) * 32
    assert (shape.rope.rotary_dim or shape.head_dim, shape.head_dim) == (
        rotary_dim,
        3072 // published["num_attention_heads"],
    )
    assert (shape.max_position_embeddings, shape.vocab_size) == (context, published["vocab_size"])


@pytest.mark.parametrize(
    "published", [PHI3_5_MINI, PHI4_MINI, PHI3_5_MOE], ids=lambda config: str(config["_name_or_path"])
)
def test_longrope_is_served_up_to_its_original_context(
    tmp_path: Path, published: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    shape = read(tmp_path, published)
    options: dict[str, Any] = {"tensor_parallel_size": 1, "quantization": None}
    with caplog.at_level("WARNING"):
        assert shape.context_length(None) == 4096
    assert "up to 4096 of 131072 positions are served: beyond them LongRoPE" in caplog.text
    shape.check_options(max_model_len=shape.context_length(None), **options)
    assert shape.context_length(100) == 100
    with pytest.raises(ConfigError, match="max_model_len=4097 exceeds the 4096 positions that LongRoPE"):
        shape.check_options(max_model_len=shape.context_length(4097), **options)
    with pytest.raises(ConfigError, match="max_model_len=131073 exceeds the model's 131072 positions"):
        shape.context_length(131073)


def test_phi_3_5_moe_is_known_by_its_published_name(tmp_path: Path) -> None:
    shape = read(tmp_path, PHI3_5_MOE)
    assert isinstance(shape, TransformersConfig)
    assert shape.architecture == "PhimoeForCausalLM"


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
@pytest.mark.parametrize(
    ("architecture", "name"), [("Phi3ForCausalLM",) * 2, ("PhimoeForCausalLM", "PhiMoEForCausalLM")]
)
def test_code_that_is_not_needed_is_not_run(tmp_path: Path, architecture: str, name: str, model_impl: str) -> None:
    path = Path(save_checkpoint(build_model(architecture), tmp_path))
    expected = generate(path, model_impl)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": [name], "auto_map": EVIL}))
    (path / "evil.py").write_text("raise SystemExit('this code was run')")
    assert generate(path, model_impl) == expected


@pytest.mark.parametrize("architectures", [["OwnForCausalLM"], [], [5], None, "Phi3ForCausalLM"])
def test_code_that_is_needed_is_refused(tmp_path: Path, architectures: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"names code of its own \(auto_map\), which Pagoda never runs, for "):
        read(tmp_path, PHI3_MINI | {"architectures": architectures})


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("DeepseekV4ForCausalLM", "its sparse attention"),
        ("JambaForCausalLM", "its recurrent layers"),
        ("KimiK3ForConditionalGeneration", "its text part is not Kimi Linear"),
    ],
)
def test_code_is_not_the_reason_if_there_is_a_better_one(tmp_path: Path, architecture: str, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=f"architecture '{architecture}' is not supported: {reason}"):
        read(tmp_path, PHI3_MINI | {"architectures": [architecture]})


def test_a_type_of_model_that_only_its_own_code_knows_is_refused(tmp_path: Path) -> None:
    message = r"has the model_type 'phi3-of-its-own', which transformers [\d.]+\S* does not know; docs/models.md lists"
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, PHI3_MINI | {"model_type": "phi3-of-its-own"})
