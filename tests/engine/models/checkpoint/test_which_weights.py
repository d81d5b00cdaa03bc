"""Which files of a directory are loaded, and in which dtype, where config.json does not say it: as by transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.worker.model_shard import ModelShard
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.models.adapter import tiny_models
from tests.engine.models.decoder.dense_families import build_dense_model

NORM = "model.norm.weight"


def dtype_of(path: Path, **options: Any) -> torch.dtype:
    return ModelShard(EngineConfig(model=str(path), device="cpu", **options), rank=0).dtype


def save_without_dtype(path: Path, convert: Any, name: str = "qwen3", **fields: Any) -> Path:
    """Save a checkpoint whose config.json names no dtype, with its tensors converted."""
    build = tiny_models.build_model if name.endswith("LM") else build_model if name == "qwen3" else build_dense_model
    model = build(name)
    save_checkpoint(model, path)
    config = json.loads((path / "config.json").read_text())
    for field in ("dtype", "torch_dtype"):
        config.pop(field, None)
    (path / "config.json").write_text(json.dumps(config | fields))
    weights = {name: convert(name, weight) for name, weight in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("name", ["qwen3", "Olmo2ForCausalLM"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_without_a_dtype_the_weights_own_is_taken(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = save_without_dtype(tmp_path, lambda _, weight: weight.to(dtype), name)
    assert dtype_of(path) == dtype
    assert dtype_of(path, dtype="float32") == torch.float32


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dtype": None}, torch.bfloat16),
        ({"torch_dtype": None}, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "float16"}, torch.float16),
        ({"dtype": "float32", "torch_dtype": "float16"}, torch.float32),
    ],
    ids=str,
)
def test_old_and_empty_fields(fields: dict[str, Any], expected: torch.dtype, tmp_path: Path) -> None:
    path = save_without_dtype(tmp_path, lambda _, weight: weight.to(torch.bfloat16), **fields)
    assert dtype_of(path) == expected


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
@pytest.mark.parametrize("fields", [{}, {"torch_dtype": "float16"}], ids=str)
def test_gemma_in_float16_is_computed_in_bfloat16(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    path = save_without_dtype(tmp_path, lambda _, weight: weight.to(torch.float16), name, **fields)
    assert dtype_of(path) == torch.bfloat16
    assert dtype_of(path, dtype="float16") == torch.float16


def test_of_mixed_files_the_dtype_of_most_weights_is_taken(tmp_path: Path) -> None:
    """Norms are often kept in float32."""
    path = save_without_dtype(tmp_path, lambda name, weight: weight if "norm" in name else weight.to(torch.bfloat16))
    assert dtype_of(path) == torch.bfloat16


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A directory with shards and their index, and beside them a single file of other weights."""
    save_checkpoint(build_model("qwen3"), tmp_path, max_shard_size="200KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    weights: dict[str, torch.Tensor] = {}
    for shard in tmp_path.glob("model-*.safetensors"):
        weights |= load_file(shard)
    save_file(weights | {NORM: torch.full((96,), 7.0)}, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_a_single_file_beside_shards_is_loaded(both: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.utime(both / "model.safetensors.index.json", (0, 0))
    with open_checkpoint(both) as checkpoint:
        assert checkpoint.read(NORM).eq(7.0).all()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "model.safetensors' (of 20" in record.message
    assert "index.json' (of 19" in record.message


def test_its_shards_and_its_index_need_not_be_whole(both: Path) -> None:
    (both / "model.safetensors.index.json").write_text("{")
    for shard in both.glob("model-*.safetensors"):
        shard.unlink()
    with open_checkpoint(both) as checkpoint:
        assert checkpoint.read(NORM).eq(7.0).all()


def test_an_index_may_list_the_single_file(both: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = list(load_file(both / "model.safetensors"))
    for shard in both.glob("model-*.safetensors"):
        shard.unlink()
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (both / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_checkpoint(both) as checkpoint:
        assert checkpoint.names == sorted(names)
    assert not caplog.records


def test_an_index_of_the_single_file_may_be_older(both: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It lists a tensor that the file no longer holds."""
    index = {"weight_map": {"lm_head.weight": "model.safetensors", NORM: "model.safetensors"}}
    (both / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_checkpoint(both) as checkpoint:
        assert "lm_head.weight" not in checkpoint
        assert checkpoint.read(NORM).eq(7.0).all()
    assert not caplog.records


def test_an_index_of_the_single_file_and_others_is_needed(both: Path) -> None:
    weights = load_file(both / "model.safetensors")
    save_file({NORM: weights.pop(NORM)}, both / "other.safetensors", {"format": "pt"})
    save_file(weights, both / "model.safetensors", {"format": "pt"})
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors") | {NORM: "other.safetensors"}}
    (both / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_checkpoint(both) as checkpoint:
        assert checkpoint.read(NORM).eq(7.0).all()


def test_config_json_may_name_the_file(both: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As transformers reads ``transformers_weights``; the file may be a link, as a hub's cache has it."""
    weights = load_file(both / "model.safetensors")
    weights[NORM].fill_(3.0)
    outside = tmp_path_factory.mktemp("blobs") / "blob.safetensors"
    save_file(weights, outside, {"format": "pt"})
    (both / "other.safetensors").symlink_to(outside)
    config = json.loads((both / "config.json").read_text())
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "other.safetensors")}
    (both / "other.safetensors.index.json").write_text(json.dumps(index))
    for name in ("other.safetensors", "other.safetensors.index.json"):
        (both / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))
        with open_checkpoint(both) as checkpoint:
            assert checkpoint.read(NORM).eq(3.0).all()
        theirs = AutoModelForCausalLM.from_pretrained(both).state_dict()
        assert theirs[NORM].eq(3.0).all()
    for name in ("missing.safetensors", f"../{outside.parent.name}/{outside.name}", "config.json", "", 5):
        (both / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))
        with (
            pytest.raises(ModelLoadError, match="transformers_weights=.* is not a safetensors file"),
            open_checkpoint(both),
        ):
            pass


def test_shards_that_the_index_does_not_list_are_named(both: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of a model that was saved later, in another number of shards, without its index."""
    (both / "model.safetensors").rename(both / "model-00001-of-00001.safetensors")
    os.utime(both / "model.safetensors.index.json", (0, 0))
    with open_checkpoint(both) as checkpoint:
        assert not checkpoint.read(NORM).eq(7.0).all()  # as by transformers
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "index.json' (of 19" in record.message
    assert "lists no '" in record.message
    assert "model-00001-of-00001.safetensors' (of 20" in record.message
