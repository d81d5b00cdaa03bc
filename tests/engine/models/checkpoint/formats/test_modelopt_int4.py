"""ModelOpt's 4-bit integers, and factors of inputs beside weights: the values, bit for bit, and the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.checkpoint.sharding import Shard
from tests.engine.models.checkpoint.formats.quantised import (
    FILE,
    Encoded,
    Quantised,
    check_tokens,
    check_values,
    save_quantised,
    tiny_model,
)
from tests.engine.models.checkpoint.formats.test_fp4 import nvfp4
from tests.engine.worker.test_tensor_parallel import ThreadRanks

GROUP = 32
UP = "model.layers.0.mlp.up_proj"


def int4(weight: torch.Tensor) -> Encoded:
    """Return a weight in which a byte holds a column's codes of two rows."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / 7).clamp(min=1e-4).bfloat16()
    own = scales.float().repeat_interleave(GROUP, 1)[:, : weight.shape[1]]
    codes = (weight / own).round().clamp(-8, 7).to(torch.int64)
    codes[0, :3] = torch.tensor([-8, 7, -1])
    nibbles = codes % 16
    packed = (nibbles[::2] | nibbles[1::2] << 4).to(torch.uint8)
    return Encoded({"weight": packed, "weight_scale": scales, "input_scale": torch.tensor(0.5)}, codes * own)


def with_factors(encoded: Encoded) -> Encoded:
    """Return a weight whose layer multiplies its inputs: what it means has the factors in it."""
    factors = torch.linspace(0.5, 2.0, encoded.values.shape[1]).bfloat16()
    return Encoded(encoded.tensors | {"pre_quant_scale": factors}, encoded.values * factors.float())


def save(kind: str, path: Path, **options: Any) -> Quantised:
    algorithm = {"nvfp4": "NVFP4_AWQ", "w4a8": "W4A8_AWQ"}.get(kind, "W4A16_AWQ")
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": GROUP, "has_zero_point": False}

    def encode(name: str, weight: torch.Tensor) -> Encoded:
        encoded = nvfp4(weight, divides=False) if kind == "nvfp4" else int4(weight)
        if kind == "w4a8":
            encoded.tensors["weight_scale_2"] = encoded.values.abs().amax() / 448
        return with_factors(encoded) if name.endswith(("o_proj", "down_proj")) and kind != "plain" else encoded

    model = tiny_model(intermediate_size=224, **options)
    return save_quantised(model, path, encode, {"quantization_config": config})


@pytest.mark.parametrize("kind", ["plain", "int4", "nvfp4", "w4a8"])
def test_every_kind_gives_the_values_and_tokens(kind: str, tmp_path: Path) -> None:
    quantised = save(kind, tmp_path)
    check_values(quantised)
    check_tokens(quantised)


@pytest.mark.parametrize("model_impl", ["pagoda", "transformers"])
def test_ranks_give_the_same_tokens(model_impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)
    check_tokens(save("int4", tmp_path, num_hidden_layers=1), tensor_parallel_size=2, model_impl=model_impl)


def test_a_part_of_a_weight_has_its_own_scales_and_factors(tmp_path: Path) -> None:
    quantised = save("int4", tmp_path, num_hidden_layers=1)
    with open_checkpoint(quantised.path) as checkpoint:
        for name, values in quantised.values.items():
            for dim in (0, 1):
                full = values.shape[dim]
                for start, stop in ((0, full // 2), (full // 3, full - 1)):
                    part = checkpoint.read(name, Shard(dim, full, start, stop))
                    assert torch.equal(part, values.narrow(dim, start, stop - start)), (name, dim, start)


@pytest.mark.parametrize(
    ("end", "tensor", "message"),
    [
        ("weight_scale_2", torch.ones(2), r"is F32 \[2\], and W4A8_AWQ has one number"),
        ("pre_quant_scale", torch.ones(7), r"is F32 \[7\], and the weight \[224, 192\]"),
        ("weight_scale", torch.ones(112, 6), r"is \[112, 6\], which is not that of scales of \[224, 192\]"),
    ],
)
def test_what_does_not_fit_is_named(end: str, tensor: torch.Tensor, message: str, tmp_path: Path) -> None:
    file = save("plain", tmp_path, num_hidden_layers=1).path / FILE
    save_file(load_file(file) | {f"{UP}.{end}": tensor}, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"'{UP}.{end}' of '{file}' {message}"), open_checkpoint(file.parent):
        pass
