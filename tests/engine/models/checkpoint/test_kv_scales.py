"""The scales of keys and values in FP8, by the names that quantised checkpoints have for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.checkpoint.kv_scales import KVScales
from engine.models.config.files.hf_config import load_hf_config
from engine.models.decoder.loader import load_decoder
from engine.models.tensor_parallel import TensorParallel
from tests.engine.checkpoints import build_model, save_checkpoint

LAYERS = "model.layers.{}.self_attn."


def save_with(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> str:
    path = save_checkpoint(build_model("qwen3", num_hidden_layers=3), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | tensors, file)
    return path


def read(path: str) -> dict[int, KVScales]:
    with open_checkpoint(path) as checkpoint:
        return checkpoint.kv_scales.read()


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),  # compressed-tensors
        ("attn.k_scale", "attn.v_scale"),  # vLLM
        ("k_proj.k_scale", "v_proj.v_scale"),  # ModelOpt
        ("k_proj.output_scale", "v_proj.output_scale"),  # Quark
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_each_program_has_its_names(names: tuple[str, str], shape: tuple[int, ...], tmp_path: Path) -> None:
    values = {0: (0.5, 0.25), 2: (2.0, 3.0)}
    tensors = {
        LAYERS.format(layer) + name: torch.full(shape, value, dtype=torch.bfloat16)
        for layer, of_layer in values.items()
        for name, value in zip(names, of_layer, strict=True)
    }
    assert read(save_with(tmp_path, tensors)) == {layer: KVScales(*scales) for layer, scales in values.items()}


def test_a_scale_of_both_the_largest_of_several_and_none(tmp_path: Path) -> None:
    tensors = {
        LAYERS.format(0) + "kv_scale": torch.tensor(0.5),
        LAYERS.format(1) + "v_scale": torch.tensor([[0.25], [0.75]]),
        LAYERS.format(2) + "q_scale": torch.tensor(3.0),  # of queries, which are not rounded
    }
    assert read(save_with(tmp_path, tensors)) == {0: KVScales(0.5, 0.5), 1: KVScales(1.0, 0.75)}


def test_the_largest_of_several_names_and_of_the_models_own_layers(tmp_path: Path) -> None:
    tensors = {
        LAYERS.format(0) + "k_proj.k_scale": torch.tensor(2.0),
        LAYERS.format(0) + "k_proj.output_scale": torch.tensor(0.5),
        "mtp.layers.0.self_attn.k_scale": torch.tensor(7.0),
    }
    assert read(save_with(tmp_path, tensors)) == {0: KVScales(2.0, 1.0)}


@pytest.mark.parametrize("scale", [torch.tensor(0.0), torch.tensor(-1.0), torch.tensor(torch.nan), torch.tensor([])])
def test_what_is_no_scale_is_an_error_only_where_it_is_read(scale: torch.Tensor, tmp_path: Path) -> None:
    path = save_with(tmp_path, {LAYERS.format(1) + "k_scale": scale})
    assert load(path).layers[1].self_attn.kv_scales == KVScales()
    with pytest.raises(ModelLoadError, match=r"the scale 'model.layers.1.self_attn.k_scale' of '.*' is .*auto"):
        load(path, has_fp8_cache=True)


def load(path: str, **options: Any) -> Any:
    return load_decoder(
        path,
        load_hf_config(path),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=32,
        parallel=TensorParallel(),
        use_cpu_kernels=False,
        **options,
    )


def test_layers_take_their_scales_for_a_cache_in_fp8_alone(tmp_path: Path) -> None:
    path = save_with(tmp_path, {LAYERS.format(1) + "k_scale": torch.tensor(0.5)})
    for has_fp8_cache, expected in ((True, KVScales(0.5, 1.0)), (False, KVScales())):
        model = load(path, has_fp8_cache=has_fp8_cache)
        assert [layer.self_attn.kv_scales for layer in model.layers] == [KVScales(), expected, KVScales()]
