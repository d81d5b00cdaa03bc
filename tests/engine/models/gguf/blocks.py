"""Random weights in GGUF's block formats, whose decoded values have a wanted spread. The package decodes them."""

from __future__ import annotations

import math

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

__all__ = ["random_weight"]

_Type = GGMLQuantizationType
_SCALES: dict[GGMLQuantizationType, tuple[int, int | None, float]] = {
    # the bytes of a block where its scale and the scale of its minima are, and their ratio for values around 0
    _Type.Q4_0: (0, None, 0.0),
    _Type.Q4_1: (0, 2, -7.5),
    _Type.Q5_0: (0, None, 0.0),
    _Type.Q5_1: (0, 2, -15.5),
    _Type.Q8_0: (0, None, 0.0),
    _Type.Q2_K: (80, 82, 1.5),
    _Type.Q3_K: (108, None, 0.0),
    _Type.Q4_K: (0, 2, 7.5),
    _Type.Q5_K: (0, 2, 15.5),
    _Type.Q6_K: (208, None, 0.0),
    _Type.IQ4_NL: (0, None, 0.0),
    _Type.IQ4_XS: (0, None, 0.0),
}


def random_weight(
    shape: tuple[int, ...], kind: GGMLQuantizationType, spread: float, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return stored rows, uint8 [..., row_bytes] (or numbers of an unpacked type), and their float32 values."""
    if kind not in _SCALES:
        values = random.normal(0.0, spread, shape).astype(np.float32)
        stored = quantize(values, kind)
        return stored, dequantize(stored, kind).astype(np.float32).reshape(shape)
    elements, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (math.prod(shape) // elements, num_bytes), dtype=np.uint8)
    scale, minimum, ratio = _SCALES[kind]
    unit = float(dequantize(_with_scales(blocks, scale, minimum, 1.0, ratio), kind).std())
    blocks = _with_scales(blocks, scale, minimum, spread / unit, ratio)
    stored = blocks.reshape(*shape[:-1], shape[-1] // elements * num_bytes)
    return stored, dequantize(stored, kind).astype(np.float32)


def _with_scales(blocks: np.ndarray, scale: int, minimum: int | None, size: float, ratio: float) -> np.ndarray:
    blocks = blocks.copy()
    blocks[:, scale : scale + 2] = np.array([size], dtype="<f2").view(np.uint8)
    if minimum is not None:
        blocks[:, minimum : minimum + 2] = np.array([size * ratio], dtype="<f2").view(np.uint8)
    return blocks
