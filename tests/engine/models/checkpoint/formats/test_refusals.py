"""What is not read, and why: weights of an unknown format, and those that mean another model without their extras."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from engine.models.config.files.hf_config import load_hf_config
from tests.engine.models.checkpoint.formats import test_compressed_integers as of_integers
from tests.engine.models.checkpoint.formats import test_fp4 as of_fp4
from tests.engine.models.checkpoint.formats import test_fp8 as of_fp8
from tests.engine.models.checkpoint.formats import test_gptq_awq as of_gptq_awq
from tests.engine.models.checkpoint.formats import test_mlx as of_mlx
from tests.engine.models.checkpoint.formats.quantised import Tensors, check_tokens

UP = "model.layers.0.mlp.up_proj"


def removed(*ends: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for end in ends:
            del tensors[f"{UP}.{end}"]

    return change


def added(end: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{UP}.{end}"] = torch.ones(192)

    return change


@pytest.mark.parametrize("model_impl", ["pagoda", "transformers"])
@pytest.mark.parametrize(
    ("save", "kind", "change", "message"),
    [
        (
            of_fp4.save,
            "modelopt",
            removed("weight_scale", "weight_scale_2"),
            r"dtype U8, and with .* known format; give",
        ),
        (of_mlx.save, 4, removed("scales", "biases"), r"dtype U32, and with the tensors beside it .*; give the checkp"),
        (of_mlx.save, 4, removed("biases"), "no biases beside it, and the config's mode None needs them"),
        (of_fp8.save, "block", removed("weight_scale_inv"), r"dtype F8_E4M3, and with the tensors beside it"),
        (of_fp4.save, "modelopt", removed("weight_scale_2"), "neither weight_scale_2 nor weight_global_scale"),
        (of_integers.save, "int4 symmetric", removed("weight_shape"), "has no weight_shape beside it"),
        (of_gptq_awq.save, "awq", removed("qzeros"), "has no qzeros beside it"),
        (of_fp4.save, "modelopt", added("smooth_scale"), r"scales the layer's inputs, which is not supported; give"),
    ],
)
def test_weights_that_cannot_be_read_are_named(
    save: Any, kind: Any, change: Callable[[Tensors], None], message: str, model_impl: str, tmp_path: Path
) -> None:
    quantised = save(kind, tmp_path, num_hidden_layers=1)
    file = quantised.path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=message) as raised:
        check_tokens(quantised, model_impl=model_impl)
    assert UP in str(raised.value)
    assert str(file) in str(raised.value)


def test_what_a_module_has_instead_is_named(tmp_path: Path) -> None:
    quantised = of_integers.save("int4 symmetric", tmp_path, num_hidden_layers=1)
    file = quantised.path / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{UP}.weight_scale"]
    save_file(tensors, file, {"format": "pt"})
    message = (
        rf"lacks the tensor '{UP}.weight', .*, but '{file}' has '{UP}.weight_packed', '{UP}.weight_shape'; download"
    )
    with pytest.raises(ModelLoadError, match=message):
        check_tokens(quantised)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config: weights and activations are rotated"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config with the format 'sparse-24-bitmask'"),
        ({"format": "marlin-24"}, "format='marlin-24', and only 'pack-quantized'"),
    ],
)
def test_other_models_than_the_weights_say_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = of_fp8.compressed()["quantization_config"] | fields
    path = of_fp8.save_quantised(
        of_fp8.tiny_model(num_hidden_layers=1), tmp_path, of_fp8.fp8_tensor, {"quantization_config": config}
    ).path
    with pytest.raises(ModelLoadError, match=f"{message}.*; give the checkpoint in bf16"):
        load_hf_config(path)


@pytest.mark.parametrize(
    ("save", "kind", "field", "value"),
    [
        (of_mlx.save_mode, "nvfp4", "mode", ["nvfp4"]),
        (of_mlx.save, 4, "bits", 4.0),
        (of_mlx.save, 4, "group_size", "32"),
        (of_fp8.save, "block", "weight_block_size", [128, "128"]),
    ],
)
def test_a_config_of_other_types_is_refused(save: Any, kind: Any, field: str, value: Any, tmp_path: Path) -> None:
    quantised = save(kind, tmp_path, num_hidden_layers=1)
    config = json.loads((quantised.path / "config.json").read_text())
    config["quantization_config"][field] = value
    (quantised.path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=str(quantised.path)):
        check_tokens(quantised)
