"""Checkpoints that must be refused, and what the config reader makes of config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError, ModelLoadError
from engine.kv.layer_cache import bytes_per_token
from engine.models.config.files.generation_defaults import GenerationDefaults
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from engine.models.decoder import loader
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.decoder.decoder import Decoder
from engine.models.decoder.loader import load_decoder
from engine.models.tensor_parallel import TensorParallel
from tests.engine.checkpoints import build_model
from tests.engine.conftest import SavedModel


def load(path: Path) -> Decoder | CpuDecoder:
    return load_decoder(
        path,
        load_hf_config(path),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=64,
        parallel=TensorParallel(),
    )


@pytest.fixture
def checkpoint(qwen3: SavedModel, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to be damaged."""
    return Path(shutil.copytree(qwen3.path, tmp_path / "checkpoint"))


def write_index(path: Path, index: str) -> None:
    """Leave the index of shards alone in a directory: beside model.safetensors it would not be read."""
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(index)


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(path: Path, **changes: torch.Tensor | None) -> None:
    file = path / "model.safetensors"
    weights = load_file(file) | changes
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, file, {"format": "pt"})


def test_a_good_checkpoint_loads(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
    model = load(checkpoint)
    assert isinstance(model, Decoder)
    assert model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()  # tied: one tensor, not two


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    edit_weights(checkpoint, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelLoadError, match=r"lacks the tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load(checkpoint)


def test_a_tensor_too_many_is_named(checkpoint: Path) -> None:
    edit_weights(checkpoint, **{"model.layers.0.self_attn.sinks": torch.zeros(4)})
    with pytest.raises(ModelLoadError, match=r"1 tensors.*'model\.layers\.0\.self_attn\.sinks'"):
        load(checkpoint)


def test_a_wrong_shape_is_named(checkpoint: Path) -> None:
    edit_weights(checkpoint, **{"model.norm.weight": torch.zeros(5)})
    with pytest.raises(ModelLoadError, match=r"'model\.norm\.weight'.*\[5\].*\[96\]"):
        load(checkpoint)


def test_pickled_weights_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin is pickled.*convert it to safetensors"):
        load(checkpoint)


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    write_index(checkpoint, json.dumps(index))
    with pytest.raises(
        ModelLoadError, match=r"lacks the shards 'model-00001-of-00002\.safetensors'.*'model\.norm\.weight'"
    ):
        load(checkpoint)


def test_an_index_may_not_lead_out_of_the_directory(checkpoint: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    write_index(checkpoint, json.dumps(index))
    with pytest.raises(ModelLoadError, match="outside its own directory"):
        load(checkpoint)


def test_a_corrupt_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors' is not a readable safetensors file"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}, "architectures": ["Evil"]}, "auto_map"),
        ({"architectures": ["BertModel"]}, "'BertModel' is not supported: no test has compared it"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"model_type": "no-such-model"}, "which transformers .* does not know"),
        ({"num_attention_heads": "six"}, "could not be read"),
        ({"quantization_config": {"quant_method": "hqq"}}, r"quantised \(hqq\), which is not supported; give the"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(checkpoint, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load(checkpoint)


def test_a_rope_type_that_needs_the_sequence_length_is_refused() -> None:
    config = build_model("llama").config
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ModelLoadError, match="rope_type='dynamic'.*default, linear, llama3, yarn"):
        ModelConfig.from_hf(config)


def test_malformed_json_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json' is not valid JSON"):
        load(checkpoint)


def test_a_missing_directory_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        load_hf_config(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("raw", "eos", "sampling"),
    [
        (None, (2,), {}),
        ({"eos_token_id": 5}, (5,), {}),
        ({"eos_token_id": [5, 6], "temperature": 0.6, "top_p": None}, (5, 6), {"temperature": 0.6}),
        ({"do_sample": False, "top_p": 0.5}, (2,), {"temperature": 0.0}),
        ({"eos_token_id": None, "top_k": 20.0}, (2,), {"top_k": 20}),
    ],
)
def test_generation_config(
    checkpoint: Path, raw: dict[str, Any] | None, eos: tuple[int, ...], sampling: dict[str, Any]
) -> None:
    file = checkpoint / "generation_config.json"
    file.unlink()
    if raw is not None:
        file.write_text(json.dumps(raw))
    defaults = GenerationDefaults.load(checkpoint, load_hf_config(checkpoint))
    assert (defaults.eos_token_ids, defaults.sampling) == (eos, sampling)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a list"),
        ('{"eos_token_id": [2, 99999]}', "eos_token_id 99999"),
        ('{"eos_token_id": [2, null]}', "eos_token_id None"),
        ('{"eos_token_id": "2"}', "eos_token_id '2'"),
        ('{"temperature": 3.0}', "defaults that are not valid: temperature=3.0"),
    ],
)
def test_a_bad_generation_config_is_refused(checkpoint: Path, raw: str, message: str) -> None:
    (checkpoint / "generation_config.json").write_text(raw)
    with pytest.raises(ModelLoadError, match=message):
        GenerationDefaults.load(checkpoint, load_hf_config(checkpoint))


@pytest.mark.parametrize("index", ["{", "{}", "[]"])
def test_a_malformed_index_is_refused(checkpoint: Path, index: str) -> None:
    write_index(checkpoint, index)
    with pytest.raises(ModelLoadError, match="is malformed"):
        load(checkpoint)


def test_sliding_windows_by_layer() -> None:
    assert ModelConfig.from_hf(build_model("qwen2").config).windows == (None, 50)
    assert ModelConfig.from_hf(build_model("mistral").config).windows == (40, 40)
    assert ModelConfig.from_hf(build_model("llama").config).windows == (None, None)


def test_kv_bytes_per_token() -> None:
    config = ModelConfig.from_hf(build_model("qwen3").config)
    size = bytes_per_token(config.layer_caches, torch.bfloat16.itemsize)
    assert size == 2 * 2 * 2 * 32 * 2  # K and V, layers, KV heads, dim, bytes
