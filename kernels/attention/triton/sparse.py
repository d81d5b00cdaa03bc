"""Attention of each query to chosen slots of a cache of latents, in Triton.

A program attends from some heads of one query to its slots, in tiles, in the order in which they are listed. So what a
query gets depends neither on the rest of the batch, nor on how its prompt was cut. A latent is loaded once for all the
program's heads; it is the value, and the key without its last elements, which are rotated.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.base import AttentionInputs

__all__ = ["sparse_attention_triton", "sparse_kernel"]

_LOG2_E = tl.constexpr(1.4426950408889634)
_MIN_DOT = 16  # tl.dot takes no smaller dimension
_TILE = {2: 32, 4: 16}  # slots and heads of a program, by bytes of an element: more would spill registers
_WARPS = 8


@triton.jit(do_not_specialize=["slots_stride"])
def sparse_kernel(
    output,  # [num_tokens, NUM_HEADS, VALUE_DIM], contiguous
    query,  # [num_tokens, NUM_HEADS, VALUE_DIM + REST_DIM]
    latents,  # [num_slots, VALUE_DIM + REST_DIM], contiguous
    topk_slots,  # int32 [num_tokens, slots_stride]
    num_chosen,  # int32 [num_tokens]
    scale,
    query_token_stride,
    query_head_stride,
    slots_stride,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dim, rest = tl.arange(0, VALUE_PADDED), tl.arange(0, REST_PADDED)
    is_dim, is_rest, is_head = (dim < VALUE_DIM)[None, :], (rest < REST_DIM)[None, :], (head < NUM_HEADS)[:, None]
    queries = query + token * query_token_stride + (head * query_head_stride)[:, None]
    latent_query = tl.load(queries + dim[None, :], mask=is_head & is_dim, other=0.0)
    rotated_query = tl.load(queries + VALUE_DIM + rest[None, :], mask=is_head & is_rest, other=0.0)

    row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    attended = tl.zeros([ROWS, VALUE_PADDED], dtype=tl.float32)
    count = tl.load(num_chosen + token)
    for start in range(0, count, TILE):
        index = start + tl.arange(0, TILE)
        is_chosen = index < count
        slot = tl.load(topk_slots + token * slots_stride + index, mask=is_chosen, other=0).to(tl.int64)
        keys = latents + (slot * (VALUE_DIM + REST_DIM))[:, None]
        values = tl.load(keys + dim[None, :], mask=is_chosen[:, None] & is_dim, other=0.0)
        rotated = tl.load(keys + VALUE_DIM + rest[None, :], mask=is_chosen[:, None] & is_rest, other=0.0)
        scores = tl.dot(latent_query, tl.trans(values), input_precision="ieee")
        scores = tl.dot(rotated_query, tl.trans(rotated), scores, input_precision="ieee") * (scale * _LOG2_E)
        scores = tl.where(is_chosen[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))  # finite: each tile has a chosen slot
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        attended = attended * rescale[:, None]
        attended += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        row_max = new_max
    attended = attended / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    to = output + (token * NUM_HEADS + head)[:, None] * VALUE_DIM + dim[None, :]
    tl.store(to, attended.to(output.dtype.element_ty), mask=is_head & is_dim)


def sparse_attention_triton(inputs: AttentionInputs) -> torch.Tensor:
    """Compute `AttentionBackend.forward` of inputs with `topk_slots`; rows that attend to nothing are zero."""
    query, slots = inputs.query, inputs.topk_slots
    assert slots is not None
    assert slots.is_contiguous()
    assert query.stride(2) == 1
    assert inputs.num_kv_heads == 1
    assert inputs.key_cache.is_contiguous()
    num_tokens, num_heads, head_dim = query.shape
    output = query.new_empty(num_tokens, num_heads, inputs.value_dim)
    rest_dim = head_dim - inputs.value_dim
    tile = _TILE[query.element_size()]
    rows = min(tile, _padded(num_heads))
    sparse_kernel[(num_tokens, triton.cdiv(num_heads, rows))](
        output,
        query,
        inputs.key_cache,
        slots,
        (slots >= 0).sum(dim=1, dtype=torch.int32),
        inputs.scale,
        *query.stride()[:2],
        slots.stride(0),
        NUM_HEADS=num_heads,
        VALUE_DIM=inputs.value_dim,
        REST_DIM=rest_dim,
        VALUE_PADDED=_padded(inputs.value_dim),
        REST_PADDED=_padded(rest_dim),
        ROWS=rows,
        TILE=tile,
        num_warps=_WARPS,
        num_stages=2,
        enable_fp_fusion=True,
    )
    return output


def _padded(size: int) -> int:
    return max(_MIN_DOT, int(triton.next_power_of_2(size)))
