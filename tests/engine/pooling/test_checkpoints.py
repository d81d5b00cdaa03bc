"""Checkpoints that are not served, and what the errors say; what the files of a checkpoint decide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelLoadError
from engine.pooling.checkpoint import PooledCheckpoint
from engine.pooling.config import PoolingConfig
from engine.pooling.runner import PoolingRunner
from tests.engine.models.checkpoint.damaged_checkpoints import little_memory
from tests.engine.pooling.checkpoints import save_classifier, save_model, save_sentence_files, write_json
from tests.engine.pooling.oracle import config_json


def read(path: Path, task: Any = "embed", pooling: dict[str, Any] | None = None, **options: Any) -> PooledCheckpoint:
    return PooledCheckpoint.read(EngineConfig(model=str(path), **options), PoolingConfig(task=task, **(pooling or {})))


def load(path: Path, task: Any = "embed", **pooling: Any) -> PoolingRunner:
    return PoolingRunner(EngineConfig(model=str(path), device="cpu"), PoolingConfig(task=task, **pooling))


def change_config(path: Path, **changes: Any) -> None:
    write_json(path / "config.json", config_json(path) | changes)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save_model(tmp_path, "bert")


def test_the_longest_text(bert: Path, tmp_path: Path) -> None:
    assert read(bert).max_model_len == 128
    save_sentence_files(bert, "cls_token", max_tokens=50)
    assert read(bert).max_model_len == 50
    assert read(bert, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="max_model_len=129 exceeds the model's 128 positions"):
        read(bert, max_model_len=129)
    assert read(save_model(tmp_path / "roberta", "roberta")).max_model_len == 128  # of 130 positions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "quantization='int8' is not available for task 'embed'; leave it out"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not available"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config"),
    ],
    ids=str,
)
def test_options_that_have_no_effect_are_refused(bert: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(bert, **options)


def _add_module(path: Path, kind: str) -> None:
    module = {"idx": 0, "name": "0", "path": "0_X", "type": f"sentence_transformers.models.{kind}"}
    write_json(path / "modules.json", [module])


def _change_pooling(path: Path, **config: Any) -> None:
    save_sentence_files(path, "cls_token", prompts={"query": "a"})
    write_json(path / "1_Pooling" / "config.json", config)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: change_config(path, architectures=["T5Model"]), "architecture 'T5Model' is not served"),
        (lambda path: change_config(path, architectures=None), "has architectures=None"),
        (lambda path: change_config(path, quantization_config={"bits": 4}), "is quantised"),
        (lambda path: change_config(path, max_position_embeddings=None), "max_position_embeddings=None"),
        (lambda path: _add_module(path, "WordWeights"), "has the module 'WordWeights'"),
        (lambda path: _add_module(path, "Transformer"), "has the module 'Transformer' in '.*0_X'"),
        (lambda path: write_json(path / "modules.json", [{"idx": 0}]), "modules.json of .* is malformed"),
        (lambda path: write_json(path / "modules.json", [{"idx": 0, "path": "../x", "type": "a.Pooling"}]), "outside"),
        (lambda path: _change_pooling(path, pooling_mode="attention"), "asks for the pooling 'attention'"),
        (lambda path: _change_pooling(path), "asks for the pooling"),
        (lambda path: _change_pooling(path, pooling_mode="mean", include_prompt=False), "include_prompt=false"),
        (lambda path: save_sentence_files(path, "cls_token", prompts={"a": ""}, default_prompt="c"), "_name='c'"),
    ],
)  # fmt: skip
def test_files_that_ask_for_something_else(bert: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(bert)
    with pytest.raises(ModelLoadError, match=message):
        read(bert)


def test_tasks_that_a_model_does_not_have(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="architecture 'BertModel' has no head that scores; set task: embed"):
        read(bert, "score")
    with pytest.raises(ModelLoadError, match="is a classifier; set task: score"):
        read(save_classifier(tmp_path / "classifier", "bert"))
    with pytest.raises(ConfigError, match="is not a directory"):
        read(tmp_path / "none")
    with pytest.raises(ConfigError, match="GGUF"):
        read(tmp_path / "model.gguf")


def _change_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(str(path / "model.safetensors"))
    change(weights)
    save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})


LAYER = "encoder.layer.0.output.dense.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: _change_weights(path, lambda weights: weights.pop(LAYER)), f"'{LAYER}' is missing;"),
        (lambda path: _change_weights(path, lambda w: w[LAYER].fill_(float("nan"))), f"'{LAYER}' .* holds NaN"),
        (lambda path: (path / "model.safetensors").write_bytes(b"x"), "is not a readable safetensors file"),
        (lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"), "convert it to safetensors"),
        (lambda path: change_config(path, model_type="roberta"), "its model_type is that of 'Roberta'"),
        (lambda path: change_config(path, vocab_size=2**24), "shape .384, 64. instead of .16777216, 64.; download"),
        (lambda path: change_config(path, intermediate_size=2**20), "has shape .96. instead of .1048576. and 8 more"),
        (lambda path: change_config(path, num_hidden_layers=512), "'encoder.layer.10.*' is missing and 8143 more; dow"),
        (lambda path: change_config(path, max_position_embeddings=2**30), "embeddings.weight' of .* instead of .10737"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit(bert: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(bert)
    with little_memory(), pytest.raises(ModelLoadError, match=message):
        load(bert)


def test_a_pooler_is_not_needed_for_vectors(bert: Path) -> None:
    """sentence-transformers saves none where the model was made without."""
    _change_weights(bert, lambda weights: [weights.pop(name) for name in list(weights) if name.startswith("pooler.")])
    assert load(bert).info.pooling is not None


def test_the_code_of_a_checkpoint_is_never_run(bert: Path) -> None:
    (bert / "modeling.py").write_text("raise SystemExit('run')")
    change_config(bert, auto_map={"AutoModel": "modeling.BertModel", "AutoConfig": "modeling.BertConfig"})
    assert load(bert).info.max_model_len == 128


def test_lengths_of_matryoshka_come_from_config_json(bert: Path) -> None:
    change_config(bert, matryoshka_dimensions=[16, 32])
    assert read(bert).matryoshka(None, 64) == (16, 32)
    assert read(bert).matryoshka(False, 64) == ()
    change_config(bert, matryoshka_dimensions=None, is_matryoshka=True)
    assert read(bert).matryoshka(None, 64) == tuple(range(1, 65))
    with pytest.raises(ConfigError, match="give lengths of 1..64"):
        load(bert, matryoshka=(65,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_of_the_options(bert: Path, dtype: str) -> None:
    config = EngineConfig(model=str(bert), device="cpu", dtype=dtype)
    assert PoolingRunner(config, PoolingConfig(task="embed")).info.dtype == dtype


def test_float16_is_computed_in_float32_on_a_cpu(tmp_path: Path) -> None:
    save_model(tmp_path, "mistral", dtype=torch.float16)
    _change_weights(tmp_path, lambda weights: weights.update({name: w.half() for name, w in weights.items()}))
    assert load(tmp_path).info.dtype == "float32"
