"""GPTQ, AWQ and AutoRound checkpoints: the values of every weight, bit for bit, and the tokens of the model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
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

GROUP = 32


def gptq(weight: torch.Tensor, bits: int, options: str) -> Encoded:
    """Return a weight as GPTQ stores it: transposed, and zero points minus one but in the second version."""
    columns = weight.shape[1]
    group_of = torch.arange(columns) // GROUP
    if "desc_act" in options:
        group_of = sorted_groups(group_of, len(weight) if "each" in options else 0)
    affine = quantise(weight, bits, group_of)
    stored = affine.zeros if "v2" in options else (affine.zeros - 1) % (1 << bits)
    tensors = {
        "qweight": pack_rows(affine.codes, bits).t(),
        "qzeros": pack_rows(stored.t(), bits),
        "scales": affine.scales.t(),
    }
    if "no g_idx" not in options:
        tensors["g_idx"] = group_of.int()
    return Encoded(tensors, affine.values)


def awq_words(codes: torch.Tensor) -> torch.Tensor:
    """Return int32 words of eight columns each, which AWQ has in an order of its own."""
    words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
    for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= codes[:, column::8] << 4 * nibble
    return words.to(torch.int32)


def awq(weight: torch.Tensor) -> Encoded:
    affine = quantise(weight, 4, torch.arange(weight.shape[1]) // GROUP)
    tensors = {
        "qweight": awq_words(affine.codes.t()),
        "qzeros": awq_words(affine.zeros.t()),
        "scales": affine.scales.t(),
    }
    return Encoded(tensors, affine.values)


def gptq_config(bits: int, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": "gptq"} | fields


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": False}
FIRST_AUTO_ROUND = AUTO_ROUND | {"quant_method": "intel/auto-round"}
EXTRA = {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}, "lm_head": {"bits": 16}}}

# Bits of GPTQ's codes (0: AWQ), options, config
KINDS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "gptq": (4, "", gptq_config(4, desc_act=False, sym=False)),
    "gptq desc_act": (4, "desc_act", gptq_config(4, desc_act=True)),
    "gptq desc_act, each its own": (4, "desc_act each", gptq_config(4, desc_act=True)),
    "gptq v2": (4, "v2", gptq_config(4, checkpoint_format="gptq_v2")),
    "gptq v2, newer name": (4, "v2 no g_idx", gptq_config(4, checkpoint_format=None, format="gptq_v2")),
    "gptq 2 bits": (2, "", gptq_config(2)),
    "gptq 3 bits": (3, "no g_idx", gptq_config(3)),
    "gptq 8 bits": (8, "no g_idx", gptq_config(8)),
    "awq": (0, "", AWQ),
    "auto-round as gptq": (4, "no g_idx", AUTO_ROUND | EXTRA | {"packing_format": "auto_round:auto_gptq"}),
    "auto-round's own": (4, "no g_idx, v2", AUTO_ROUND | {"packing_format": "auto_round:exllamav2"}),
    "auto-round's first": (4, "v2", FIRST_AUTO_ROUND | {"backend": "auto_round:exllamav2"}),
    "auto-round as gptq, first": (4, "", FIRST_AUTO_ROUND | {"backend": "auto_round:gptq:exllamav2"}),
    "auto-round as awq": (0, "", AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}),
}


def save(kind: str, path: Path, **options: Any) -> Quantised:
    bits, stored, config = KINDS[kind]

    def encode(name: str, weight: torch.Tensor) -> Encoded:
        exception = config.get("extra_config", {}).get(name, {})
        return gptq(weight, exception.get("bits", bits), stored) if bits else awq(weight)

    return save_quantised(tiny_model(intermediate_size=224, **options), path, encode, {"quantization_config": config})


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_values_and_tokens(kind: str, tmp_path: Path) -> None:
    quantised = save(kind, tmp_path)
    check_values(quantised)
    check_tokens(quantised)


def test_transformers_modules_get_the_same_values(tmp_path: Path) -> None:
    check_tokens(save("awq", tmp_path), model_impl="transformers")


@pytest.mark.parametrize("model_impl", ["pagoda", "transformers"])
def test_biases_of_zero_that_the_model_has_not_are_ignored(model_impl: str, tmp_path: Path) -> None:
    quantised = save("gptq", tmp_path, num_hidden_layers=1)
    file, name = quantised.path / FILE, "model.layers.0.mlp.up_proj.bias"
    bias = torch.zeros(224, dtype=torch.float16)
    save_file(load_file(file) | {name: bias}, file, {"format": "pt"})
    check_tokens(quantised, model_impl=model_impl)
    bias[-1] = 1
    save_file(load_file(file) | {name: bias}, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=re.escape(name)):
        check_tokens(quantised, model_impl=model_impl)


@pytest.mark.parametrize("kind", ["gptq desc_act", "gptq 3 bits", "awq"])
def test_a_part_of_a_weight_has_its_own_scales_and_zero_points(kind: str, tmp_path: Path) -> None:
    quantised = save(kind, tmp_path, num_hidden_layers=1)
    with open_checkpoint(quantised.path) as checkpoint:
        for name, values in quantised.values.items():
            for dim in (0, 1):
                full = values.shape[dim]
                for start, stop in ((0, full // 2), (full // 2, full), (full // 3, full - 1)):
                    part = checkpoint.read(name, Shard(dim, full, start, stop))
                    assert torch.equal(part, values.narrow(dim, start, stop - start)), (name, dim, start)


@pytest.mark.parametrize(
    "fields", [{"version": "gemv"}, {"quant_method": "gptq", "checkpoint_format": "marlin"}, {"bits": "four"}]
)
def test_another_layout_is_refused_before_anything_is_read(fields: dict[str, Any], tmp_path: Path) -> None:
    quantised = save_quantised(
        tiny_model(num_hidden_layers=1), tmp_path, lambda _, weight: awq(weight), {"quantization_config": AWQ | fields}
    )
    (key, value) = list(fields.items())[-1]
    with (
        pytest.raises(ModelLoadError, match=rf"{key}='{value}'.*; give the checkpoint in bf16"),
        open_checkpoint(quantised.path),
    ):
        pass
