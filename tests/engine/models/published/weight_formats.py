"""FORMS: how published checkpoints are quantised: the encoder of a weight, the fields of the config, further files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from tests.engine.models.checkpoint.formats import test_bitsandbytes as of_bitsandbytes
from tests.engine.models.checkpoint.formats import test_compressed_integers as of_integers
from tests.engine.models.checkpoint.formats import test_fp4 as of_fp4
from tests.engine.models.checkpoint.formats import test_fp8 as of_fp8
from tests.engine.models.checkpoint.formats import test_gptq_awq as of_gptq_awq
from tests.engine.models.checkpoint.formats import test_mlx as of_mlx
from tests.engine.models.checkpoint.formats.quantised import Encoded

__all__ = ["FORMS", "Form"]

Encode: TypeAlias = Callable[[str, torch.Tensor], Encoded]
Form: TypeAlias = tuple[Encode, dict[str, Any], dict[str, Any]]
IN_FILE = "hf_quant_config.json"  # ModelOpt's, beside a config.json that does not say it


def integers(bits: int, **weights: Any) -> dict[str, Any]:
    """Return the config of compressed-tensors' integers."""
    group = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32, "actorder": None} | weights
    groups = {"group_0": {"weights": group, "targets": ["Linear"], "input_activations": None}}
    own = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "kv_cache_scheme": None}
    own |= {"format": "pack-quantized" if bits == 4 else "int-quantized", "config_groups": groups}
    return {"quantization_config": own | {"ignore": ["lm_head", "re:.*self_attn.*"]}}


def mixed(name: str, weight: torch.Tensor) -> Encoded:
    """Return NVFP4 of feed-forward layers and the head, and FP8 of others, as ModelOpt's MIXED_PRECISION has them."""
    is_fp4 = ".mlp." in name or ".experts." in name or name == "lm_head"
    return of_fp4.nvfp4(weight, divides=False) if is_fp4 else of_fp8.fp8_modelopt(name, weight)


def four_bits(_: str, weight: torch.Tensor) -> Encoded:
    return of_bitsandbytes.four_bits(weight, "nf4", is_nested=True)


BLOCK = [64, 96]  # divides few of the tiny weights, as [128, 128] divides few of the real ones
FP8_BLOCKS = of_fp8.fp8_block_of_another_size
MODELOPT_CONFIG = {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "kv_cache_scheme": {"num_bits": 8}}
FORMS: dict[str, Form] = {
    "fp8 blocks": (FP8_BLOCKS, of_fp8.fp8(weight_block_size=BLOCK, modules_to_not_convert=["gate", "lm_head"]), {}),
    "fp8 blocks, ue8m0": (FP8_BLOCKS, of_fp8.fp8(weight_block_size=BLOCK, scale_fmt="ue8m0"), {}),
    "fp8 blocks, null": (FP8_BLOCKS, of_fp8.fp8(weight_block_size=BLOCK, modules_to_not_convert=None), {}),
    "fp8 mistral": (of_fp8.fp8_mistral, of_fp8.fp8(weight_block_size=None, activation_scheme="static"), {}),
    "fp8 dynamic": (of_fp8.fp8_channel, of_fp8.compressed(strategy="channel"), {}),
    "fp8 static": (of_fp8.fp8_tensor, of_fp8.compressed(strategy="tensor"), {}),
    "fp8 modelopt": (of_fp8.fp8_modelopt, {}, {IN_FILE: {"quantization": of_fp8.MODELOPT}}),
    "fp8 quark": (of_fp8.fp8_tensor, {"quantization_config": {"quant_method": "quark"}}, {}),
    "nvfp4": (
        lambda _, weight: of_fp4.nvfp4(weight, divides=False),
        {},
        {IN_FILE: {"producer": {"name": "modelopt"}, "quantization": of_fp4.MODELOPT}},
    ),
    "nvfp4 compressed": (
        lambda _, weight: of_fp4.nvfp4(weight, divides=True),
        {"quantization_config": of_fp4.compressed("nvfp4-pack-quantized")},
        {},
    ),
    "nvfp4 and fp8": (mixed, {"quantization_config": MODELOPT_CONFIG | {"quant_algo": "MIXED_PRECISION"}}, {}),
    "mxfp4 quark": (
        lambda _, weight: of_fp4.mxfp4(weight, "weight"),
        {"quantization_config": {"quant_method": "quark"}},
        {},
    ),
    "w4a16": (lambda _, weight: of_integers.encode(weight, "int4 symmetric"), integers(4), {}),
    "w4a16 asymmetric": (
        lambda _, weight: of_integers.encode(weight, "int4 actorder that was not computed"),
        integers(4, symmetric=False),
        {},
    ),
    "w8a8": (lambda _, weight: of_integers.encode(weight, "int8 bytes"), integers(8, strategy="channel"), {}),
    "awq": (
        lambda _, weight: of_gptq_awq.awq(weight),
        {"quantization_config": of_gptq_awq.AWQ | {"modules_to_not_convert": None}},
        {},
    ),
    "gptq": (
        lambda _, weight: of_gptq_awq.gptq(weight, 4, ""),
        {"quantization_config": of_gptq_awq.gptq_config(4, sym=True, desc_act=False, dynamic={"-:.*gate.*": {}})},
        {},
    ),
    "gptq int8": (
        lambda _, weight: of_gptq_awq.gptq(weight, 8, ""),
        {"quantization_config": of_gptq_awq.gptq_config(8)},
        {},
    ),
    "auto-round": (
        lambda _, weight: of_gptq_awq.gptq(weight, 4, "no g_idx"),
        {"quantization_config": of_gptq_awq.AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}},
        {},
    ),
    "nf4": (
        four_bits,
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}},
        {},
    ),
    "mlx": (
        lambda _, weight: of_mlx.encode(weight, 4, 32),
        {key: {"bits": 4, "group_size": 32} for key in ("quantization", "quantization_config")},
        {},
    ),
}
