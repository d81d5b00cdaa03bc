"""Quantised weights of recurrent layers: each parameter is what the dequantised checkpoint gives, also by ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.checkpoint.weights import read_weights, require_parameters
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from engine.models.decoder.decoder import Decoder
from engine.models.tensor_parallel import TensorParallel
from kernels.layer_ops.torch import TorchOps
from tests.engine.models.checkpoint.formats import test_compressed_integers as of_integers
from tests.engine.models.checkpoint.formats import test_fp4 as of_fp4
from tests.engine.models.checkpoint.formats import test_fp8 as of_fp8
from tests.engine.models.checkpoint.formats.quantised import Encoded, save_quantised
from tests.engine.models.decoder.recurrent.recurrent_families import build_recurrent_model

_CHOSEN = re.compile(r"layers\..*(_proj|_proj_\w+|\.w[123]|_linear)\.weight$")
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}}},
}
Encode = Callable[[str, torch.Tensor], Encoded]
FORMATS: dict[str, tuple[Encode, dict[str, Any]]] = {
    "fp8 in blocks": (of_fp8.fp8_block_of_another_size, of_fp8.fp8(weight_block_size=[64, 96])),
    "int4 in groups": (
        lambda _, weight: of_integers.encode(weight, "int4 symmetric"),
        {"quantization_config": INT4},
    ),
    "nvfp4": (
        lambda _, weight: of_fp4.nvfp4(weight, divides=False),
        {"quantization_config": {"quant_method": "modelopt"} | of_fp4.MODELOPT},
    ),
}


def parameters(path: Path, rank: int, size: int) -> dict[str, torch.Tensor]:
    """Return a rank's parameters of the decoder."""
    config = ModelConfig.from_hf(load_hf_config(path))
    parallel = TensorParallel()
    parallel.rank, parallel.size = rank, size
    with torch.device("meta"):
        skeleton = Decoder(config, torch.zeros(1), parallel, TorchOps())
    shapes = {name: parameter.shape for name, parameter in skeleton.named_parameters()}
    with open_checkpoint(path) as checkpoint:
        parameters = require_parameters(checkpoint, shapes, config, parallel, torch.float32)
        weights = read_weights(checkpoint, parameters, torch.device("cpu"))
        return {name: weight.clone() for name, weight in weights}


CASES = [
    (name, form)
    for name in ("lfm2", "qwen3-next-biases", "qwen3.5", "granite-4-h", "falcon-h1", "nemotron-3-super")
    for form in FORMATS
]
FEW = {("lfm2", "fp8 in blocks"), ("qwen3-next-biases", "int4 in groups"), ("nemotron-3-super", "nvfp4")}
FEW |= {("qwen3.5", "fp8 in blocks"), ("falcon-h1", "int4 in groups")}


@pytest.mark.parametrize(
    ("name", "form"), [case if case in FEW else pytest.param(*case, marks=pytest.mark.long) for case in CASES]
)
def test_parameters_are_those_of_the_dequantised_checkpoint(name: str, form: str, tmp_path: Path) -> None:
    encode, config = FORMATS[form]
    model = build_recurrent_model(name, moe_intermediate_size=48)  # NVFP4 needs multiples of 16
    quantised = save_quantised(
        model, tmp_path, encode, config, chosen=lambda weight: _CHOSEN.search(weight) is not None
    )
    chosen = {weight.rpartition(".layers.")[2].split(".", 1)[1] for weight in quantised.values}
    assert any("in_proj" in module for module in chosen)
    assert any("out_proj" in module for module in chosen)
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        expected = parameters(tmp_path / "plain", rank, size)
        computed = parameters(quantised.path, rank, size)
        assert computed.keys() == expected.keys()
        for weight, value in expected.items():
            assert torch.equal(computed[weight], value), weight
