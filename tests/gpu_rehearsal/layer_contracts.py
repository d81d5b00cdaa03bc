"""The contracts of the kernels of kernels/layer_ops: what a launch must pass, and what it computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F

from kernels.cache.fp8 import FP8
from kernels.layer_ops.base import Addend, LayerCache, Norm, Rotation
from kernels.layer_ops.torch import TorchOps
from tests.gpu_rehearsal.kernel_contracts import Compute, Contract, plain, require, require_scales, require_tensor

__all__ = ["CONTRACTS", "require_rows"]

_OPS = TorchOps()  # computes on the data, which is on the host


def require_rows(name: str, tensor: torch.Tensor, stride: int, dtype: torch.dtype, *shape: int) -> None:
    require_tensor(name, tensor, dtype, *shape)
    require(tensor.stride(1) == 1, f"{name} is not contiguous in its last dimension")
    require(tensor.stride(0) == stride, f"{stride} is not the stride of {name}'s rows, {tensor.stride(0)}")


def _require_block(name: str, block: int, size: int) -> None:
    require(block >= size and block & (block - 1) == 0, f"{name}={block} is not a power of two from {size} on")


def _norm(weight: Any, eps: float, adds_one: bool) -> Norm | None:
    return None if weight is None else SimpleNamespace(weight=plain(weight), eps=eps, adds_one=adds_one)


def add_norm(call: Any, grid: tuple[int, ...]) -> Compute:
    """LayerOps.add_norm."""
    residual, shape = call.residual, call.residual.shape
    require_rows("residual", residual, call.residual_stride, residual.dtype, *shape)
    require(shape == (call.num_rows, call.WIDTH), f"residual {tuple(shape)}: num_rows={call.num_rows}")
    _require_block("BLOCK", call.BLOCK, call.WIDTH)
    require(1 <= grid[0] <= call.num_rows, f"the grid {grid} has programs without a row")
    for name in ("total", "normed") if call.addend is not None else ("normed",):  # what is written
        require_tensor(name, getattr(call, name), residual.dtype, *shape)
        require(getattr(call, name).is_contiguous(), f"{name} is not contiguous")
    for name in ("weight", "addend_weight"):
        if getattr(call, name) is not None:
            require_tensor(name, getattr(call, name), residual.dtype, call.WIDTH)
    norms = [_norm(weight, call.eps, call.ADDS_ONE) for weight in (call.addend_weight, call.weight)]
    addend = None
    if call.addend is not None:
        require_rows("addend", call.addend, call.addend_stride, residual.dtype, *shape)
        scale = None if call.sum_scale is None else plain(call.sum_scale)
        addend = Addend(plain(call.addend), norms[0], call.scale, scale)

    def compute() -> None:
        total, normed = _OPS.add_norm(plain(residual), addend, norms[1])
        if addend is not None:
            plain(call.total).copy_(total)
        if norms[1] is not None:
            plain(call.normed).copy_(normed)

    return compute


def rotate_and_store(call: Any, grid: tuple[int, ...]) -> Compute:
    """LayerOps.rotate_and_store."""
    (num_tokens, num_heads, head_dim), (num_blocks, block_size, num_kv_heads, _) = (
        call.query.shape,
        call.key_cache.shape,
    )
    require((num_heads, num_kv_heads, head_dim) == (call.NUM_HEADS, call.NUM_KV_HEADS, call.HEAD_DIM), "constants")
    for name, padded, size in (
        ("HEADS_PADDED", call.HEADS_PADDED, num_heads),
        ("KV_HEADS_PADDED", call.KV_HEADS_PADDED, num_kv_heads),
        ("HALF_PADDED", call.HALF_PADDED, head_dim // 2),
    ):
        _require_block(name, padded, size)
    dtype = call.qkv.dtype
    num_stored = 0 if call.slot_mapping is None else 2 * num_kv_heads  # keys and values; a layer may only read them
    require_rows("qkv", call.qkv, call.qkv_stride, dtype, num_tokens, (num_heads + num_stored) * head_dim)
    require(tuple(grid) == (num_tokens,), f"the grid {grid} is not one program for each of {num_tokens} tokens")
    require(call.query.is_contiguous() and call.query.dtype == dtype, "query")
    is_fp8 = require_scales(call, dtype)
    for name in ("key_cache", "value_cache"):
        stored = torch.uint8 if is_fp8 else dtype
        require_tensor(name, getattr(call, name), stored, num_blocks, block_size, num_kv_heads, head_dim)
        require(getattr(call, name).is_contiguous(), f"{name} is not contiguous")
    for name, heads in (("query_weight", num_heads), ("key_weight", num_kv_heads)):
        if (weight := getattr(call, name)) is not None:
            require_tensor(name, weight, dtype, head_dim if call.NORMS_EACH_HEAD else heads * head_dim)
    slots = _slots(call, num_tokens, num_blocks * block_size)
    norms = [_norm(weight, call.eps, call.ADDS_ONE) for weight in (call.query_weight, call.key_weight)]
    cache = LayerCache(plain(call.key_cache), plain(call.value_cache), slots)
    if is_fp8:
        scales = 1.0 / call.inverse_key_scale, 1.0 / call.inverse_value_scale
        cache = LayerCache(cache.keys.view(FP8), cache.values.view(FP8), slots, *scales)
    rotation = _rotation(call)
    eps = call.eps if call.NORMS_VALUES else None
    return lambda: plain(call.query).copy_(_OPS.rotate_and_store(plain(call.qkv), *norms, rotation, cache, eps))


def _slots(call: Any, num_tokens: int, num_slots: int) -> torch.Tensor | None:
    """Check where a step writes keys and values; None: the layer only reads what another one writes."""
    if call.slot_mapping is None:
        require(not call.NORMS_VALUES, "values are normalized, and there are none")
        return None
    require_tensor("slot_mapping", call.slot_mapping, torch.int64, num_tokens)
    require(call.slot_mapping.is_contiguous(), "slot_mapping is not contiguous")
    slots = plain(call.slot_mapping)
    require(bool(((slots >= -1) & (slots < num_slots)).all()), f"slot_mapping leaves the {num_slots} slots")
    return slots


def _rotation(call: Any) -> Rotation | None:
    if call.table is None:
        return None
    require_tensor("table", call.table, torch.float32, None, 2, call.HEAD_DIM // 2)
    require(call.table.is_contiguous(), "table is not contiguous")
    require_tensor("positions", call.positions, torch.int64, call.query.shape[0])
    require(call.positions.is_contiguous(), "positions is not contiguous")
    positions, length = plain(call.positions), call.table.shape[0]
    require(bool(((positions >= 0) & (positions < length)).all()), f"positions leaves the table of {length}")
    return Rotation(plain(call.table), positions, call.qkv.dtype)


def gated_activation(call: Any, grid: tuple[int, ...]) -> Compute:
    """LayerOps.gated_activation."""
    num_tokens, width = call.output.shape
    require(width == call.WIDTH and call.output.is_contiguous(), f"output {tuple(call.output.shape)}")
    require_rows("gate_up", call.gate_up, call.gate_up_stride, call.output.dtype, num_tokens, 2 * width)
    require(tuple(grid) == (num_tokens, -(-width // call.BLOCK)), f"the grid {grid} does not cover the output")
    activation = "gelu_tanh" if call.IS_GELU else "silu"
    return lambda: plain(call.output).copy_(_OPS.gated_activation(plain(call.gate_up), activation))


def linear(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.linear.triton."""
    num_rows, num_outputs = call.output.shape
    dtype = call.output.dtype
    require(call.output.is_contiguous() and call.weight.is_contiguous(), "an operand is not contiguous")
    require_rows("rows", call.rows, call.row_stride, dtype, num_rows, call.num_inputs)
    require_tensor("weight", call.weight, dtype, num_outputs, call.num_inputs)
    require((call.num_rows, call.num_outputs) == (num_rows, num_outputs), "sizes do not match the output")
    if call.HAS_BIAS:
        require_tensor("bias", call.bias, dtype, num_outputs)
    tiles = -(-num_rows // call.BLOCK_ROWS) * -(-num_outputs // call.BLOCK_OUTPUTS)
    require(tuple(grid) == (tiles,), f"the grid {grid} is not one program for each of {tiles} tiles")
    bias = plain(call.bias) if call.HAS_BIAS else None
    return lambda: plain(call.output).copy_(F.linear(plain(call.rows), plain(call.weight), bias))


CONTRACTS: dict[str, Contract] = {
    "linear_kernel": linear,
    "add_norm_kernel": add_norm,
    "rotate_and_store_kernel": rotate_and_store,
    "gated_activation_kernel": gated_activation,
}
