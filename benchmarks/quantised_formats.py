"""Writes a checkpoint in quantised formats, by rounding to the nearest code, to measure what a format costs.

Published checkpoints are made with more care, so that they lose less: GPTQ, AWQ and the like look at activations.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

__all__ = ["FORMATS", "QuantisedFormat", "write_quantised"]

_GROUP, _BLOCK, _NF4_BLOCK, _NESTED_BLOCK = 128, 128, 64, 256
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_LARGEST_E4M3, _LARGEST_E2M1 = 448.0, 6.0
# QLoRA (Dettmers et al., 2023), appendix E
_NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ]
)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class QuantisedFormat:
    """A format of quantised checkpoints.

    Attributes:
        encode: from a weight [out, in] in float32 to the tensors that are stored, by what follows the module's name.
        config: ``quantization_config`` of config.json.
    """

    encode: Callable[[torch.Tensor], Tensors]
    config: dict[str, Any]


def write_quantised(source: Path, directory: Path, form: QuantisedFormat) -> None:
    """Write the checkpoint ``source`` with its linear layers in a format; the directory must not exist."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        encoded = form.encode(tensors.pop(name).float())
        tensors |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in encoded.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = form.config
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """Return codes of 4 bits, two a byte, the first in the low half."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes packed in words along the second dimension, the first in the lowest bits."""
    per_word = 32 // bits
    parts = codes.long().view(len(codes), -1, per_word) << torch.arange(0, 32, bits)
    return parts.sum(2).to(torch.int32)


def _groups(weight: torch.Tensor, size: int) -> torch.Tensor:
    return weight.view(len(weight), -1, size)


def _nearest(numbers: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the index of the nearest number of an increasing table."""
    return torch.bucketize(numbers, (table[1:] + table[:-1]) / 2)


def _e2m1(numbers: torch.Tensor) -> torch.Tensor:
    return _nearest(numbers.abs(), _E2M1) | (numbers < 0).long() << 3


def _fp8(weight: torch.Tensor) -> Tensors:
    blocks = weight.view(len(weight) // _BLOCK, _BLOCK, -1, _BLOCK)
    scales = blocks.abs().amax((1, 3)) / _LARGEST_E4M3
    codes = (blocks / scales[:, None, :, None]).view_as(weight).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}


def _mxfp4(weight: torch.Tensor) -> Tensors:
    groups = _groups(weight, 32)
    exponents = groups.abs().amax(2, keepdim=True).log2().floor() - 2
    codes = _e2m1(groups / exponents.exp2()).view_as(weight)
    return {"weight_packed": _pairs(codes), "weight_scale": (exponents.squeeze(2) + 127).to(torch.uint8)}


def _nvfp4(weight: torch.Tensor) -> Tensors:
    groups, factor = _groups(weight, 16), weight.abs().max() / (_LARGEST_E2M1 * _LARGEST_E4M3)
    scales = (groups.abs().amax(2) / _LARGEST_E2M1 / factor).to(torch.float8_e4m3fn)
    codes = _e2m1(groups / (scales.float() * factor).unsqueeze(2)).view_as(weight)
    return {"weight": _pairs(codes), "weight_scale": scales, "weight_scale_2": factor}


def _int4(weight: torch.Tensor) -> Tensors:
    groups = _groups(weight, _GROUP)
    scales = (groups.abs().amax(2) / 7).bfloat16()
    codes = (groups / scales.float().unsqueeze(2)).round().clamp(-8, 7).view_as(weight) + 8
    shape = torch.tensor(weight.shape)
    return {"weight_packed": _words(codes, 4), "weight_scale": scales, "weight_shape": shape}


def _gptq(weight: torch.Tensor) -> Tensors:
    """GPTQ's layout with zero points and ``desc_act``: a random order, the same for projections of the same inputs."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    groups = _groups(weight[:, order], _GROUP)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (groups / scales.float().unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, 15).view_as(weight)
    group_of = torch.empty(weight.shape[1], dtype=torch.int32)
    group_of[order] = torch.arange(weight.shape[1], dtype=torch.int32) // _GROUP
    stored = torch.empty_like(codes).index_copy_(1, order, codes)
    return {
        "qweight": _words(stored, 4).t(),
        "qzeros": _words(((zeros - 1) % 16).t(), 4),
        "scales": scales.t(),
        "g_idx": group_of,
    }


def _nf4(weight: torch.Tensor) -> Tensors:
    """NF4 with double quantisation; bitsandbytes' own table for scales is finer near zero than this one."""
    blocks = weight.view(-1, _NF4_BLOCK)
    largest = blocks.abs().amax(1)
    offset, table = largest.mean(), torch.linspace(-1, 1, 256)
    parts = torch.split(largest - offset, _NESTED_BLOCK)
    nested = torch.stack([part.abs().max() for part in parts])
    own = nested.repeat_interleave(_NESTED_BLOCK)[: len(largest)]
    scale_codes = _nearest((largest - offset) / own, table)
    scales = table[scale_codes] * own + offset
    codes = _nearest(blocks / scales.unsqueeze(1), _NF4).view(-1, 2)
    fields = {"quant_type": "nf4", "blocksize": _NF4_BLOCK, "dtype": "bfloat16", "shape": list(weight.shape)}
    fields |= {"nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(offset)}
    return {
        "weight": (codes[:, :1] << 4 | codes[:, 1:]).to(torch.uint8),
        "weight.absmax": scale_codes.to(torch.uint8),
        "weight.quant_map": _NF4.clone(),
        "weight.nested_absmax": nested,
        "weight.nested_quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8),
    }


def _int8(weight: torch.Tensor) -> Tensors:
    largest = weight.abs().amax(1)
    return {"weight": (weight / largest.unsqueeze(1) * 127).round().to(torch.int8), "SCB": largest}


_GROUPS_OF_4_BITS = {"num_bits": 4, "type": "int", "group_size": _GROUP, "strategy": "group", "symmetric": True}
FORMATS: dict[str, QuantisedFormat] = {
    "FP8, blocks of 128": QuantisedFormat(_fp8, {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}),
    "bitsandbytes int8": QuantisedFormat(_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "bitsandbytes NF4": QuantisedFormat(_nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "NVFP4": QuantisedFormat(_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "MXFP4": QuantisedFormat(_mxfp4, {"quant_method": "compressed-tensors"}),
    "GPTQ, 4 bits, groups of 128, desc_act": QuantisedFormat(
        _gptq, {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": True}
    ),
    "compressed-tensors, 4 bits, groups of 128": QuantisedFormat(
        _int4,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": _GROUPS_OF_4_BITS, "targets": ["Linear"]}},
        },
    ),
}
