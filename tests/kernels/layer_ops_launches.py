"""Launch the kernels of a decoder's layers as models of many shapes do, for compile_for_gpu.py."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import torch

from kernels.layer_ops.base import Activation, Addend, LayerCache, Norm, Rotation
from kernels.layer_ops.triton.ops import TritonOps

__all__ = ["MODELS", "run_layer_ops"]


@dataclass(frozen=True)
class Shape:
    """What the variants of a model's kernels follow from."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    norms: Literal["before", "after", "around"] = "before"
    qk_norm: Literal["none", "head", "projection"] = "none"
    adds_one: bool = False
    activation: Activation = "silu"
    dtype: torch.dtype = torch.bfloat16
    rotates: bool = True
    normalizes_values: bool = False
    scales_sums: bool = False
    stores: bool = True

    def norm(self, width: int) -> Norm:
        return SimpleNamespace(weight=torch.zeros(width, dtype=self.dtype), eps=1e-6, adds_one=self.adds_one)


MODELS = {
    "Qwen3-0.6B": Shape(1024, 3072, 16, 8, qk_norm="head"),
    "Qwen3-8B": Shape(4096, 12288, 32, 8, qk_norm="head"),
    "Qwen3-8B in float16": Shape(4096, 12288, 32, 8, qk_norm="head", dtype=torch.float16),
    "Qwen3-8B in float32": Shape(4096, 12288, 32, 8, qk_norm="head", dtype=torch.float32),
    "Llama-3.1-405B": Shape(16384, 53248, 128, 8),
    "SmolLM3-3B without RoPE": Shape(2048, 11008, 16, 4, rotates=False),
    "Phi-4-mini": Shape(3072, 8192, 24, 8),
    "GLM-4-9B": Shape(4096, 13696, 32, 2, norms="around"),
    "OLMo-3-7B": Shape(4096, 11008, 32, 32, norms="after", qk_norm="projection"),
    "OLMo-2-32B": Shape(5120, 27648, 40, 8, norms="after", qk_norm="projection"),
    "Gemma-3-1B": Shape(1152, 6912, 4, 1, 256, "around", "head", True, "gelu_tanh"),
    "Gemma-4-26B": Shape(
        2816, 2112, 16, 8, 256, "around", "head", False, "gelu_tanh", normalizes_values=True, scales_sums=True
    ),
    "Gemma-4-31B, full attention": Shape(
        5376, 21504, 32, 4, 512, "around", "head", False, "gelu_tanh", normalizes_values=True, scales_sums=True
    ),
    "Gemma-4-E4B, shared keys": Shape(
        2560, 20480, 8, 2, 512, "around", "head", False, "gelu_tanh", scales_sums=True, stores=False
    ),
    "Gemma-2-27B": Shape(4608, 36864, 32, 16, 128, "around", "none", True, "gelu_tanh"),
}


def run_layer_ops(shape: Shape) -> None:
    """Launch every kernel of the first layer, of a later one, and of the last norm."""
    ops, dtype = TritonOps(), shape.dtype
    hidden = torch.zeros(3, shape.hidden, dtype=dtype)
    before = shape.norm(shape.hidden) if shape.norms != "after" else None
    scale = torch.zeros(1, dtype=dtype) if shape.scales_sums else None
    addend = Addend(hidden, shape.norm(shape.hidden) if shape.norms != "before" else None, 1.0, scale)
    ops.add_norm(hidden, None, before)
    ops.add_norm(hidden, addend, before)
    ops.add_norm(hidden, addend, shape.norm(shape.hidden))
    num_stored = 2 * shape.num_kv_heads if shape.stores else 0
    qkv = torch.zeros(3, (shape.num_heads + num_stored) * shape.head_dim, dtype=dtype)
    heads = (shape.num_heads, shape.num_kv_heads) if shape.qk_norm == "projection" else (1, 1)
    norms = [None if shape.qk_norm == "none" else shape.norm(count * shape.head_dim) for count in heads]
    positions = torch.zeros(3, dtype=torch.int64)
    rotation = Rotation(torch.zeros(9, 2, shape.head_dim // 2), positions, dtype) if shape.rotates else None
    keys = torch.zeros(1, 16, shape.num_kv_heads, shape.head_dim, dtype=dtype)
    cache = LayerCache(keys, keys.clone(), positions if shape.stores else None)
    ops.rotate_and_store(qkv, norms[0], norms[1], rotation, cache, 1e-6 if shape.normalizes_values else None)
    ops.gated_activation(torch.zeros(3, 2 * shape.intermediate, dtype=dtype), shape.activation)
