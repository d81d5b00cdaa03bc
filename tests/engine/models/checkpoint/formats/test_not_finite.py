"""A quantised weight is finite exactly if it is said to be, whether its numbers or only its scales were looked at."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.models.checkpoint.checkpoint import open_checkpoint

INPUTS, OUTPUTS, GROUP = 256, 128, 32
Tensors = dict[str, torch.Tensor]


def octets(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def words(*shape: int) -> torch.Tensor:
    return octets(*shape[:-1], 4 * shape[-1]).view(torch.int32)


def grouped(rows: int, columns: int, scale: float) -> Tensors:
    """Return GPTQ's or AWQ's codes; one group of one output has ``scale``."""
    scales = torch.full((INPUTS // GROUP, OUTPUTS), 0.01)
    scales[1, 3] = scale
    return {"qweight": words(rows, columns), "qzeros": words(INPUTS // GROUP, OUTPUTS // 8), "scales": scales}


def gptq(scale: float) -> Tensors:
    return grouped(INPUTS // 8, OUTPUTS, scale)


def awq(scale: float) -> Tensors:
    return grouped(INPUTS, OUTPUTS // 8, scale)


def exponents(scale: float) -> torch.Tensor:
    """Return E8M0 exponents, one of which is ``scale``; NaN is 255."""
    stored = torch.full((OUTPUTS, INPUTS // GROUP), 120, dtype=torch.uint8)
    stored[3, 1] = 255 if scale != scale else 127 + round(math.log2(min(scale, 2.0**127)))
    return stored


def mxfp4(scale: float) -> Tensors:
    return {"weight_packed": octets(OUTPUTS, INPUTS // 2), "weight_scale": exponents(scale)}


def gpt_oss(scale: float) -> Tensors:
    blocks = octets(1, OUTPUTS, INPUTS // GROUP, GROUP // 2)
    return {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": exponents(scale)[None]}


def fp8(scale: float) -> Tensors:
    codes = (octets(OUTPUTS, INPUTS) & 0xBF).view(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": torch.tensor([[0.01, scale]])}


KINDS: dict[str, tuple[Callable[[float], Tensors], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP}),
    "mxfp4": (mxfp4, {"quant_method": "compressed-tensors"}),
    "gpt-oss": (gpt_oss, {"quant_method": "mxfp4"}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}


@pytest.mark.parametrize("scale", [0.01, 3e4, 1e38, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_finite_exactly_if_it_is_said_to_be(
    kind: str, dtype: torch.dtype, scale: float, tmp_path: Path
) -> None:
    write, config = KINDS[kind]
    save_file(
        {f"model.{name}": tensor.contiguous() for name, tensor in write(scale).items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with open_checkpoint(tmp_path) as checkpoint:
        (name,) = checkpoint.names
        out = torch.empty(checkpoint.shape_of(name), dtype=dtype)
        is_known_finite = checkpoint.read_into(out, name)
    assert is_known_finite == bool(out.isfinite().all())
    assert is_known_finite or scale > 0.01 or scale != scale
