"""The same quantised weights with the configs, and the further tensors, that other programs write beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.models.checkpoint.formats import test_compressed_integers as of_integers
from tests.engine.models.checkpoint.formats import test_fp4 as of_fp4
from tests.engine.models.checkpoint.formats import test_fp8 as of_fp8
from tests.engine.models.checkpoint.formats import test_gptq_awq as of_gptq_awq
from tests.engine.models.checkpoint.formats.quantised import FILE, check_tokens

AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4, "group_size": 16}
# How weights are saved, and the fields of the config's quantization_config that replace the others.
FIELDS: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "layers by another name": (of_fp8.save, "block", {"ignored_layers": ["lm_head"]}),
    "no list of layers": (of_fp8.save, "block", {"modules_to_not_convert": None}),
    "SGLang's name of INT8": (of_integers.save, "int8 bytes", {"quant_method": "w8a8_int8"}),
    "SGLang's name of NVFP4": (of_fp4.save, "mixed precision", {"quant_method": "modelopt_fp4"}),
    "MXFP8 by its own name": (of_fp8.save, "mxfp8", {"quant_method": "mxfp8"}),
    "another hyphen": (of_integers.save, "int4 symmetric", {"quant_method": "compressed_tensors"}),
    "AutoRound's NVFP4": (of_fp4.save, "compressed-tensors", AUTO_ROUND | {"data_type": "nv_fp"}),
    "AutoRound's MXFP8": (of_fp8.save, "mxfp8", AUTO_ROUND | {"bits": 8, "data_type": "mx_fp", "group_size": 32}),
    "no format": (of_integers.save, "int4 symmetric", {"format": None}),
    "capitals": (of_gptq_awq.save, "awq", {"version": "GEMM"}),
    "empty transforms": (of_fp8.save, "channel", {"transform_config": {}, "sparsity_config": {}}),
}


@pytest.mark.parametrize("name", FIELDS)
def test_another_config_of_the_same_weights(name: str, tmp_path: Path) -> None:
    save, kind, fields = FIELDS[name]
    quantised = save(kind, tmp_path, num_hidden_layers=1)
    file = quantised.path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= fields
    file.write_text(json.dumps(config))
    check_tokens(quantised)


@pytest.mark.parametrize("value", [None, {}])
def test_a_config_without_what_the_file_beside_it_says(value: Any, tmp_path: Path) -> None:
    quantised = of_fp8.save("modelopt", tmp_path, num_hidden_layers=1)
    file = quantised.path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": value}))
    check_tokens(quantised)


LAYER = "model.layers.0.self_attn"
ONE, ZERO = torch.ones(1), torch.zeros(1)
TENSORS: dict[str, dict[str, torch.Tensor]] = {
    "scales of attention": {f"{LAYER}.attn.{kind}_scale": ONE for kind in "kvq"},
    "zero points of a cache": {f"{LAYER}.k_zero_point": ZERO, f"{LAYER}.v_zero_point": ZERO},
    "outputs that are not quantised": {"lm_head.input_scale": ONE, "lm_head.output_scale": ONE},
    "frequencies of RoPE": {f"{LAYER}.rotary_emb.inv_freq": ONE, "model.rotary_emb.inv_freq": ONE},
}


@pytest.mark.parametrize("model_impl", ["pagoda", "transformers"])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_what_is_not_computed(name: str, model_impl: str, tmp_path: Path) -> None:
    quantised = of_fp8.save("channel", tmp_path, num_hidden_layers=1)
    further = {key: tensor.clone() for key, tensor in TENSORS[name].items()}
    save_file(load_file(quantised.path / FILE) | further, quantised.path / FILE, {"format": "pt"})
    check_tokens(quantised, model_impl=model_impl)
