"""Integer checkpoints of compressed-tensors: the values of every weight, bit for bit, and the tokens of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.checkpoint.sharding import Shard
from tests.engine.models.checkpoint.formats.affine import pack_rows, quantise, sorted_groups
from tests.engine.models.checkpoint.formats.quantised import (
    FILE,
    Encoded,
    Quantised,
    check_tokens,
    check_values,
    save_quantised,
    tiny_model,
)
from tests.engine.models.decoder.dense_families import build_dense_model
from tests.engine.worker.test_tensor_parallel import ThreadRanks


def encode(weight: torch.Tensor, kind: str) -> Encoded:
    """Return a weight as compressed-tensors writes it."""
    bits, group, options = KINDS[kind]
    out, columns = weight.shape
    group_of = torch.arange(columns) // (group or columns)
    if "ordered" in options:
        group_of = sorted_groups(group_of)
    is_symmetric = "asymmetric" not in options
    affine = quantise(weight, bits, group_of, is_symmetric=is_symmetric, dtype=torch.bfloat16)
    half = 1 << bits - 1
    tensors = {"weight_scale": affine.scales}
    if "plain" in options:
        tensors["weight"] = (affine.codes - half).to(torch.int8)
        if not is_symmetric:
            tensors["weight_zero_point"] = (affine.zeros - half).to(torch.int8)
        tensors["input_scale"] = torch.ones(1)
        return Encoded(tensors, affine.values)
    tensors |= {"weight_packed": pack_rows(affine.codes, bits), "weight_shape": torch.tensor([out, columns])}
    if not is_symmetric:
        tensors["weight_zero_point"] = pack_rows(affine.zeros.t(), bits).t()
    if "ordered" in options:
        tensors["weight_g_idx"] = group_of.int()
    elif "actorder" in kind:
        tensors["weight_g_idx"] = torch.full((columns,), -1, dtype=torch.int32)
    return Encoded(tensors, affine.values)


# Bits, inputs of a group (0: all), options
KINDS: dict[str, tuple[int, int, str]] = {
    "int4 symmetric": (4, 32, ""),
    "int4 asymmetric, last group smaller": (4, 64, "asymmetric"),
    "int4 actorder": (4, 8, "asymmetric ordered"),
    "int4 actorder, groups of 32": (4, 32, "asymmetric ordered"),
    "int4 actorder that was not computed": (4, 32, "asymmetric"),
    "int8 by channel": (8, 0, "asymmetric"),
    "int8 bytes": (8, 0, "plain"),
    "int8 bytes, asymmetric": (8, 8, "plain asymmetric"),
}


def save(kind: str, path: Path, **options: Any) -> Quantised:
    bits, group, _ = KINDS[kind]
    weights = {"num_bits": bits, "type": "int", "group_size": group or -1, "strategy": "group" if group else "channel"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "naive-quantized" if "bytes" in kind else "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"], "input_activations": None}},
    }
    return save_quantised(
        tiny_model(**options), path, lambda _, weight: encode(weight, kind), {"quantization_config": config}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_values_and_tokens(kind: str, tmp_path: Path) -> None:
    quantised = save(kind, tmp_path)
    check_values(quantised)
    check_tokens(quantised)


def test_zero_points_that_may_be_outside_the_codes_are_not_kept(tmp_path: Path) -> None:
    """A byte beside codes of 4 bits may be any number; dequantised, it is what it says."""
    quantised = save("int4 symmetric", tmp_path, num_hidden_layers=1)
    tensors = load_file(quantised.path / FILE)
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[f"{name}_zero_point"] = torch.full_like(tensors[f"{name}_scale"], -20, dtype=torch.int8)
    save_file(tensors, quantised.path / FILE, {"format": "pt"})
    with open_checkpoint(quantised.path) as checkpoint:
        scales = tensors[f"{name}_scale"].float().repeat_interleave(32, dim=1)
        moved = quantised.values[name] + 20 * scales[:, : quantised.values[name].shape[1]]
        assert torch.allclose(checkpoint.read(name), moved, rtol=1e-5)
        assert checkpoint.code_format(name) is None


def test_transformers_modules_get_the_same_values(tmp_path: Path) -> None:
    check_tokens(save("int4 actorder", tmp_path), model_impl="transformers")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["phi3", "glm4"])
def test_projections_that_are_stored_together(
    family: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Phi-3 stores queries, keys and values in one weight; GLM-4's queries and keys are put in another order."""
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)
    config = {
        "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", "group_size": 32}
    }
    quantised = save_quantised(
        build_dense_model(family), tmp_path, lambda _, weight: encode(weight, "int4 symmetric"), config
    )
    check_values(quantised)
    check_tokens(quantised, tensor_parallel_size=ranks)


def test_tensor_parallel_ranks_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)
    check_tokens(save("int4 asymmetric, last group smaller", tmp_path), tensor_parallel_size=2)


@pytest.mark.parametrize("kind", ["int4 actorder", "int8 bytes, asymmetric"])
def test_a_part_of_a_weight_has_its_own_scales_and_zero_points(kind: str, tmp_path: Path) -> None:
    quantised = save(kind, tmp_path, num_hidden_layers=1)
    with open_checkpoint(quantised.path) as checkpoint:
        for name, values in quantised.values.items():
            for dim in (0, 1):
                full = values.shape[dim]
                for start, stop in ((0, full // 2), (full // 2, full), (full // 3, full - 1)):
                    part = checkpoint.read(name, Shard(dim, full, start, stop))
                    assert torch.equal(part, values.narrow(dim, start, stop - start)), (name, dim, start)
