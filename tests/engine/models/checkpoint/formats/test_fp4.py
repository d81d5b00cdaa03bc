"""NVFP4 and MXFP4 checkpoints: the values of every weight, bit for bit, and the tokens of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.models.adapter import tiny_models
from tests.engine.models.checkpoint.formats.quantised import (
    Encoded,
    Quantised,
    check_tokens,
    check_values,
    is_linear,
    save_quantised,
    tiny_model,
)
from tests.engine.models.checkpoint.formats.test_fp8 import VALUES as FP8
from tests.engine.models.checkpoint.formats.test_fp8 import exponents, fp8_modelopt

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES = torch.tensor(MAGNITUDES + [-value for value in MAGNITUDES])  # of the codes: a sign, 2 bits of exponent, 1 more


def nearest_codes(weight: torch.Tensor) -> torch.Tensor:
    return (weight[..., None] - VALUES).abs().argmin(-1)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Return two codes a byte: the even element is in the low half."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def nvfp4(weight: torch.Tensor, *, divides: bool) -> Encoded:
    maxima = weight.unflatten(1, (-1, 16)).abs().amax(2)
    factor = maxima.amax() / 6 / 448
    scales = (maxima / 6 / factor).to(torch.float8_e4m3fn)
    exact = FP8[scales.view(torch.uint8).long()]
    stored = 1 / factor if divides else factor
    own = (exact / stored if divides else exact * stored).repeat_interleave(16, 1)
    codes = nearest_codes(weight / own.clamp(min=1e-9))
    values = VALUES[codes] * own
    if divides:
        tensors = {"weight_packed": pack(codes), "weight_global_scale": stored.view(1)}
        return Encoded(tensors | {"weight_scale": scales, "input_global_scale": torch.ones(1)}, values)
    tensors = {"weight": pack(codes), "weight_scale_2": stored, "input_scale": torch.tensor(0.5)}
    return Encoded(tensors | {"weight_scale": scales}, values)


def mxfp4(weight: torch.Tensor, name: str = "weight_packed") -> Encoded:
    stored = exponents((weight.unflatten(1, (-1, 32)).abs().amax(2) / 6).clamp(min=1e-3))
    own = (2.0 ** (stored.float() - 127)).repeat_interleave(32, 1)
    codes = nearest_codes(weight / own)
    return Encoded({name: pack(codes), "weight_scale": stored}, VALUES[codes] * own)


MODELOPT = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8", "exclude_modules": []}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16}},
}


def compressed(form: str) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "group_size": 32 if "mx" in form else 16}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"], "format": form}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


def save(kind: str, path: Path, **options: Any) -> Quantised:
    model = tiny_model(intermediate_size=224, **options)
    files = {"hf_quant_config.json": {"quantization": MODELOPT}} if kind == "modelopt" else None
    config = {
        "modelopt": {},
        "mixed precision": {"quantization_config": MIXED},
        "compressed-tensors": {"quantization_config": compressed("nvfp4-pack-quantized")},
        "mxfp4": {"quantization_config": compressed("mxfp4-pack-quantized")},
        "mxfp4 quark": {"quantization_config": {"quant_method": "quark"}},
    }[kind]

    def encode(name: str, weight: torch.Tensor) -> Encoded:
        if kind == "mixed precision" and ".self_attn." in name:
            return fp8_modelopt(name, weight)
        if kind.startswith("mxfp4"):
            return mxfp4(weight, "weight" if kind == "mxfp4 quark" else "weight_packed")
        return nvfp4(weight, divides=kind == "compressed-tensors")

    return save_quantised(
        model,
        path,
        encode,
        config,
        files=files,
        chosen=lambda name: is_linear(name) or (name == "lm_head.weight" and kind == "mixed precision"),
    )


@pytest.mark.parametrize("kind", ["modelopt", "mixed precision", "compressed-tensors", "mxfp4", "mxfp4 quark"])
def test_every_kind_gives_the_values_and_tokens(kind: str, tmp_path: Path) -> None:
    quantised = save(kind, tmp_path)
    assert ("lm_head.weight" in quantised.values) == (kind == "mixed precision")
    check_values(quantised)
    check_tokens(quantised)


def gpt_oss(name: str, weight: torch.Tensor) -> Encoded:
    """Return the experts of a layer as GPT-OSS stores them: transposed, in blocks of 32 inputs."""
    matrix = name.rpartition(".")[2]
    rows = weight.transpose(1, 2).flatten(0, 1)  # of all experts
    encoded = mxfp4(rows)
    experts, outputs = len(weight), weight.shape[2]
    values = encoded.values.view(experts, outputs, -1).transpose(1, 2)
    blocks = encoded.tensors["weight_packed"].view(experts, outputs, -1, 16)
    scales = encoded.tensors["weight_scale"].view(experts, outputs, -1)
    return Encoded({f"{matrix}_blocks": blocks, f"{matrix}_scales": scales}, values)


def save_gpt_oss(path: Path) -> Quantised:
    model = tiny_models.build_model("GptOssForCausalLM", hidden_size=64, intermediate_size=160, head_dim=16)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return save_quantised(
        model,
        path,
        gpt_oss,
        {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": skipped}},
        chosen=lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj")),
    )


def test_gpt_oss(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    quantised = save_gpt_oss(tmp_path)
    check_values(quantised)
    stored = load_file(quantised.path / "model.safetensors")
    for name, values in quantised.values.items():  # the format's own library agrees
        theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
        assert torch.equal(theirs, values)
    check_tokens(quantised, model_impl="transformers")
