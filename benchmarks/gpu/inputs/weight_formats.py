"""Formats in which benchmark checkpoints have the weights of their linear layers, as compressed-tensors and FP8 do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BFLOAT16", "FORMATS", "StoredTensor", "WeightFormat"]

GROUP = 64  # inputs with one scale; the tiny sizes have no groups of 128
BLOCK = 128


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file.

    Attributes:
        dtype: as safetensors names it.
        shape: its sizes.
        kind: what its numbers are: ``weight`` of a layer, ``norm``, ``codes``, ``scale``, or ``sizes``: the values.
        values: of ``sizes``.
    """

    dtype: str
    shape: tuple[int, ...]
    kind: str
    values: tuple[int, ...] = ()


Split = Callable[[int, int], dict[str, StoredTensor]]


@dataclass(frozen=True)
class WeightFormat:
    """How a linear layer's weight is stored.

    Attributes:
        bytes_per_weight: with its scales.
        split: returns the tensors of a weight [outputs, inputs], by the ends of their names.
        config: entries of config.json.
    """

    bytes_per_weight: float
    split: Split
    config: dict[str, Any] = field(default_factory=dict)


def _plain(outputs: int, inputs: int) -> dict[str, StoredTensor]:
    return {"weight": StoredTensor("BF16", (outputs, inputs), "weight")}


def _int4(outputs: int, inputs: int) -> dict[str, StoredTensor]:
    return {
        "weight_packed": StoredTensor("I32", (outputs, inputs // 8), "codes"),
        "weight_scale": StoredTensor("BF16", (outputs, inputs // GROUP), "scale"),
        "weight_shape": StoredTensor("I64", (2,), "sizes", (outputs, inputs)),
    }


def _fp8(outputs: int, inputs: int) -> dict[str, StoredTensor]:
    return {
        "weight": StoredTensor("F8_E4M3", (outputs, inputs), "codes"),
        "weight_scale_inv": StoredTensor("F32", (-(-outputs // BLOCK), -(-inputs // BLOCK)), "scale"),
    }


_INT4_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
_INT4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4_WEIGHTS}},
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}
_FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}

BFLOAT16 = WeightFormat(2, _plain)
FORMATS = {
    "int4": WeightFormat(0.5 + 2 / GROUP, _int4, {"quantization_config": _INT4_CONFIG}),
    "fp8": WeightFormat(1 + 4 / BLOCK**2, _fp8, {"quantization_config": _FP8_CONFIG}),
}
