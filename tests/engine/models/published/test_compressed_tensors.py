"""The library compressed-tensors, through transformers, computes from our tiny checkpoints the tokens that we do.

Elsewhere what a checkpoint means is computed by the tests themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.engine.models.checkpoint.formats import test_compressed_integers as of_integers
from tests.engine.models.checkpoint.formats import test_fp4 as of_fp4
from tests.engine.models.checkpoint.formats import test_fp8 as of_fp8
from tests.engine.models.checkpoint.formats.quantised import (
    FILE,
    Encoded,
    Quantised,
    check_tokens,
    check_values,
    save_quantised,
    tiny_model,
)

Encode = Callable[[str, torch.Tensor], Encoded]


def integers(kind: str) -> Encode:
    return lambda _, weight: of_integers.encode(weight, kind)


GROUPS = {"type": "int", "strategy": "group", "group_size": 32}
# The format's name, the encoder, and the scheme of the weights
CASES: dict[str, tuple[str, Encode, dict[str, Any]]] = {
    "w4a16": ("pack-quantized", integers("int4 symmetric"), GROUPS | {"num_bits": 4}),
    "w4a16 asymmetric": (
        "pack-quantized",
        integers("int4 actorder that was not computed"),
        GROUPS | {"num_bits": 4, "symmetric": False},
    ),
    "w8a16": (
        "pack-quantized",
        integers("int8 by channel"),
        {"type": "int", "strategy": "channel", "num_bits": 8, "symmetric": False},
    ),
    "w8a8": ("int-quantized", integers("int8 bytes"), {"type": "int", "strategy": "channel", "num_bits": 8}),
    "fp8 channel": ("float-quantized", of_fp8.fp8_channel, {"type": "float", "strategy": "channel", "num_bits": 8}),
    "fp8 tensor": ("float-quantized", of_fp8.fp8_tensor, {"type": "float", "strategy": "tensor", "num_bits": 8}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        lambda _, weight: of_fp4.nvfp4(weight, divides=True),
        {"type": "float", "strategy": "tensor_group", "num_bits": 4, "group_size": 16},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        lambda _, weight: of_fp4.mxfp4(weight),
        GROUPS | {"type": "float", "num_bits": 4, "scale_dtype": "torch.uint8"},
    ),
}


def weights_of(name: str) -> dict[str, Any]:
    """Return the scheme of a case's weights."""
    return {"symmetric": True, "dynamic": False} | CASES[name][2]


def save(name: str, path: Path) -> Quantised:
    form, encode, _ = CASES[name]
    group = {"targets": ["Linear"], "weights": weights_of(name), "input_activations": None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    config |= {"config_groups": {"group_0": group | {"format": form}}, "ignore": ["lm_head"], "kv_cache_scheme": None}
    return save_quantised(tiny_model(intermediate_size=224), path, encode, {"quantization_config": config})


# transformers 5.24 refuses asymmetric ones, whose zero points it expects elsewhere, and computes FP4 in bfloat16.
@pytest.mark.parametrize("name", ["w4a16", "w8a8", "fp8 channel", "fp8 tensor"])
def test_transformers_computes_the_same(name: str, tmp_path: Path) -> None:
    quantised = save(name, tmp_path)
    file = quantised.path / FILE
    save_file({key: part for key, part in load_file(file).items() if not key.endswith(".input_scale")}, file)
    loaded, info = AutoModelForCausalLM.from_pretrained(quantised.path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"], info
    check_tokens(Quantised(quantised.path, loaded.eval(), {}))


@pytest.mark.parametrize("name", CASES)
def test_the_library_reads_the_same_values(name: str, tmp_path: Path) -> None:
    form, _, _ = CASES[name]
    quantised = save(name, tmp_path)
    check_values(quantised)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights_of(name)), format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors = load_file(quantised.path / FILE)
    for weight, values in quantised.values.items():
        module = weight.removesuffix("weight")
        parts = {key.removeprefix(module): part for key, part in tensors.items() if key.startswith(module)}
        if parts["weight_scale"].dtype == torch.bfloat16:
            parts["weight_scale"] = parts["weight_scale"].float()  # the library computes in the dtype of scales
        theirs = compressor.decompress(parts, scheme)["weight"]  # of NVFP4 in bfloat16
        assert torch.equal(theirs, values.to(theirs.dtype)), weight
