"""The KV cache write as a Triton kernel: one program a token copies all heads of its key and value.

Imported on the first write on a GPU, so that a CPU needs no Triton. The contract is `kernels.cache.store_kvcache`'s.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cache.fp8 import FP8
from kernels.cache.triton.fp8 import encode_fp8


# The alignment of slot_mapping may change from step to step, and a step must not wait for a compilation.
@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _store_kernel(
    key,
    value,  # or None
    key_cache,
    value_cache,  # or None
    slot_mapping,
    inverse_key_scale,  # of caches of FP8, which are uint8; else None
    inverse_value_scale,
    key_token_stride,
    key_head_stride,
    key_dim_stride,
    value_token_stride,
    value_head_stride,
    value_dim_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least NUM_KV_HEADS * HEAD_DIM
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        element = tl.arange(0, BLOCK)  # of the slot, whose heads are contiguous
        head, dim = element // HEAD_DIM, element % HEAD_DIM
        mask = element < NUM_KV_HEADS * HEAD_DIM
        key_offset = token * key_token_stride + head * key_head_stride + dim * key_dim_stride
        value_offset = token * value_token_stride + head * value_head_stride + dim * value_dim_stride
        cache_offset = slot.to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM) + element
        stored_key = tl.load(key + key_offset, mask=mask)
        if inverse_key_scale is not None:
            stored_key = encode_fp8(stored_key, inverse_key_scale)
        tl.store(key_cache + cache_offset, stored_key, mask=mask)
        if value is not None:
            stored_value = tl.load(value + value_offset, mask=mask)
            if inverse_value_scale is not None:
                stored_value = encode_fp8(stored_value, inverse_value_scale)
            tl.store(value_cache + cache_offset, stored_value, mask=mask)


def store_kvcache_triton(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Launch the write of `kernels.cache.store_kvcache`, whose shapes it shares."""
    assert key_cache.is_contiguous()
    assert value_cache is None or value_cache.is_contiguous()
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    is_fp8 = key_cache.dtype == FP8
    if is_fp8:
        key_cache = key_cache.view(torch.uint8)
        value_cache = None if value_cache is None else value_cache.view(torch.uint8)
    _store_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        1.0 / key_scale if is_fp8 else None,
        1.0 / value_scale if is_fp8 else None,
        *key.stride(),
        *((0, 0, 0) if value is None else value.stride()),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(num_kv_heads * head_dim),
        enable_fp_fusion=False,
    )
