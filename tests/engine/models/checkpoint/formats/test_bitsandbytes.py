"""bitsandbytes checkpoints: the values of every weight, bit for bit, and the tokens of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.models.checkpoint.formats.quantised import (
    Encoded,
    Quantised,
    check_tokens,
    check_values,
    save_quantised,
    tiny_model,
)

# Quantiles of a normal distribution, from the QLoRA paper (Dettmers et al., 2023), appendix E, rounded.
LOWER = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
UPPER = [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
NF4 = torch.tensor(LOWER + UPPER)
FP4 = torch.tensor([0.0, 0.0052, 0.6667, 1.0, 0.3333, 0.5, 0.1667, 0.25])
TABLES = {"nf4": NF4, "fp4": torch.cat([FP4, -FP4])}
DYNAMIC = torch.linspace(-1, 1, 256)
BLOCK, NESTED_BLOCK = 64, 256


def four_bits(weight: torch.Tensor, kind: str, *, is_nested: bool) -> Encoded:
    table, flat = TABLES[kind], weight.flatten()
    blocks = flat.split(BLOCK)
    scales = torch.stack([block.abs().amax() for block in blocks])
    state: dict[str, Any] = {"quant_type": kind, "blocksize": BLOCK, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {"weight.quant_map": table, "weight.absmax": scales}
    if is_nested:
        offset = float(scales.mean())
        parts = (scales - offset).split(NESTED_BLOCK)
        maxima = torch.stack([part.abs().amax() for part in parts])
        codes = [(part / top - DYNAMIC[:, None]).abs().argmin(0) for part, top in zip(parts, maxima, strict=True)]
        scales = torch.cat([DYNAMIC[code] * top for code, top in zip(codes, maxima, strict=True)]) + offset
        tensors |= {"weight.absmax": torch.cat(codes).to(torch.uint8), "weight.nested_quant_map": DYNAMIC}
        tensors |= {"weight.nested_absmax": maxima}
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    codes = [
        (block / scale.clamp(min=1e-9) - table[:, None]).abs().argmin(0)
        for block, scale in zip(blocks, scales, strict=True)
    ]
    values = torch.cat([table[code] * scale for code, scale in zip(codes, scales, strict=True)]).view(weight.shape)
    joined = torch.cat(codes)
    tensors["weight"] = (joined[::2] << 4 | joined[1::2]).to(torch.uint8).view(-1, 1)  # the first is in the high half
    content = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return Encoded(tensors | {f"weight.quant_state.bitsandbytes__{kind}": content}, values)


def eight_bits(weight: torch.Tensor) -> Encoded:
    maxima = weight.abs().amax(1)
    codes = (weight / maxima[:, None] * 127).round().to(torch.int8)
    values = codes.float() * maxima[:, None] * torch.tensor(1 / 127)
    return Encoded({"weight": codes, "SCB": maxima, "weight_format": torch.tensor(0, dtype=torch.uint8)}, values)


def save(kind: str, path: Path, **options: Any) -> Quantised:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": kind != "int8", "load_in_8bit": kind == "int8"}
    config |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": ["lm_head"]}

    def encode(_: str, weight: torch.Tensor) -> Encoded:
        return eight_bits(weight) if kind == "int8" else four_bits(weight, kind[:3], is_nested="double" in kind)

    return save_quantised(tiny_model(**options), path, encode, {"quantization_config": config})


@pytest.mark.parametrize("kind", ["nf4 double", "nf4", "fp4", "int8"])
def test_every_kind_gives_the_values_and_tokens(kind: str, tmp_path: Path) -> None:
    quantised = save(kind, tmp_path)
    check_values(quantised)
    check_tokens(quantised)
