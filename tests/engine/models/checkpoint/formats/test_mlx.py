"""MLX's checkpoints: the values of every weight, bit for bit, and the tokens of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.models.checkpoint.formats.affine import pack_rows
from tests.engine.models.checkpoint.formats.quantised import (
    Encoded,
    Quantised,
    Tensors,
    check_tokens,
    check_values,
    is_linear,
    save_quantised,
    tiny_model,
)
from tests.engine.models.checkpoint.formats.test_fp4 import VALUES as FP4
from tests.engine.models.checkpoint.formats.test_fp4 import mxfp4, nearest_codes, pack
from tests.engine.models.checkpoint.formats.test_fp8 import VALUES as FP8
from tests.engine.models.checkpoint.formats.test_fp8 import mxfp8

EMBEDDING = "model.embed_tokens.weight"


def encode(weight: torch.Tensor, bits: int, group: int) -> Encoded:
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low) / ((1 << bits) - 1)).clamp(min=1e-4).bfloat16()
    biases = low.bfloat16()
    own_scales, own_biases = (part.float().repeat_interleave(group, 1) for part in (scales, biases))
    codes = ((weight - own_biases) / own_scales).round().clamp(0, (1 << bits) - 1)
    tensors = {"weight": pack_rows(codes, bits).view(torch.uint32), "scales": scales, "biases": biases}
    return Encoded(tensors, codes * own_scales + own_biases)


def save(bits: int, path: Path, family: str = "qwen3", **options: Any) -> Quantised:
    sizes: dict[str, Any] = {"bits": bits, "group_size": 32}
    exceptions = {"model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 64}, "lm_head": False}
    config = {"quantization": sizes | exceptions, "quantization_config": sizes | exceptions}

    def encoded(name: str, weight: torch.Tensor) -> Encoded:
        own = exceptions.get(name) or sizes
        assert isinstance(own, dict)
        return encode(weight, own["bits"], own["group_size"])

    model = tiny_model(family, intermediate_size=256, **options)
    return save_quantised(model, path, encoded, config, chosen=lambda name: is_linear(name) or name == EMBEDDING)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_number_of_bits_gives_the_values_and_tokens(bits: int, tmp_path: Path) -> None:
    quantised = save(bits, tmp_path, tie_word_embeddings=True)
    assert EMBEDDING in quantised.values
    check_values(quantised)
    check_tokens(quantised)


def as_words(encoded: Encoded, codes: str) -> Encoded:
    """Return a weight of FP4 or FP8 as MLX has it: without a global scale, and in words."""
    scales = encoded.tensors["weight_scale"].view(torch.uint8)
    return Encoded({"weight": encoded.tensors[codes].view(torch.uint32), "scales": scales}, encoded.values)


def nvfp4_without_factor(weight: torch.Tensor) -> Encoded:
    scales = (weight.unflatten(1, (-1, 16)).abs().amax(2) / 6).to(torch.float8_e4m3fn)
    own = FP8[scales.view(torch.uint8).long()].repeat_interleave(16, 1)
    codes = nearest_codes(weight / own.clamp(min=1e-9))
    return Encoded({"weight": pack(codes), "weight_scale": scales}, FP4[codes] * own)


MODES: dict[str, tuple[int, int, Callable[[torch.Tensor], Encoded]]] = {
    "mxfp4": (4, 32, lambda weight: as_words(mxfp4(weight), "weight_packed")),
    "nvfp4": (4, 16, lambda weight: as_words(nvfp4_without_factor(weight), "weight")),
    "mxfp8": (8, 32, lambda weight: as_words(mxfp8("", weight), "weight")),
}


def save_mode(mode: str, path: Path, **options: Any) -> Quantised:
    bits, group, encoder = MODES[mode]
    sizes = {"bits": bits, "group_size": group, "mode": mode}
    config = {"quantization": sizes, "quantization_config": sizes}
    model = tiny_model(intermediate_size=256, **options)
    return save_quantised(model, path, lambda _, weight: encoder(weight), config)


@pytest.mark.parametrize("mode", MODES)
def test_fp4_and_fp8_give_the_values_and_tokens(mode: str, tmp_path: Path) -> None:
    quantised = save_mode(mode, tmp_path)
    check_values(quantised)
    check_tokens(quantised)


def stacked(tensors: Tensors) -> Tensors:
    """Return the tensors with those of a layer's experts stacked, as MLX has them."""
    result: Tensors = {}
    mixtral = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for name, tensor in tensors.items():
        block, separator, rest = name.partition(".experts.")
        if not separator:
            result[name] = tensor
            continue
        end = rest.partition(".")[2]
        count = sum(other.startswith(f"{block}.experts.") and other.endswith(f".{end}") for other in tensors)
        members = [tensors[f"{block}.experts.{expert}.{end}"].view(torch.uint8) for expert in range(count)]
        matrix, _, kind = end.partition(".")
        result[f"{block}.switch_mlp.{mixtral.get(matrix, matrix)}.{kind}"] = torch.stack(members).view(tensor.dtype)
    return result


@pytest.mark.parametrize("model_impl", ["pagoda", "transformers"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_are_stacked(family: str, model_impl: str, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    quantised = save(4, tmp_path, family, num_hidden_layers=2, **sizes)
    file = quantised.path / "model.safetensors"
    save_file(stacked(load_file(file)), file, {"format": "pt"})
    assert any(".switch_mlp." in name for name in load_file(file))
    check_values(quantised)
    check_tokens(quantised, model_impl=model_impl)
