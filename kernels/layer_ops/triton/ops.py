"""TritonOps: each operation of a layer as one launch of a kernel of kernels.py.

Every launch parameter follows from shapes, never from what a tensor holds, so a CUDA graph can capture a step. Those
that compile follow from the model alone, so the first step compiles what all steps launch.
"""

from __future__ import annotations

import torch
import triton

from kernels.cache.fp8 import FP8
from kernels.layer_ops.base import Activation, Addend, LatentCache, LayerCache, LayerOps, Norm, Rotation
from kernels.layer_ops.triton.kernels import add_norm_kernel, gated_activation_kernel, rotate_and_store_kernel
from kernels.layer_ops.triton.latents import rotate_and_store_latents_kernel

__all__ = ["TritonOps"]

_MAX_PROGRAMS = 1024  # of add_norm: they fill any GPU, and a larger step loads weights no more often
_ACTIVATION_BLOCK = 1024


class TritonOps(LayerOps):
    """The operations on a GPU, or in Triton's interpreter."""

    def add_norm(
        self, residual: torch.Tensor, addend: Addend | None, norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if addend is None and norm is None:
            return residual, residual
        assert residual.stride(1) == 1
        num_tokens, width = residual.shape
        total = residual if addend is None else residual.new_empty(residual.shape)
        normed = total if norm is None else residual.new_empty(residual.shape)
        if num_tokens == 0:
            return total, normed
        values, addend_norm = (None, None) if addend is None else (addend.values, addend.norm)
        assert values is None or (values.shape == residual.shape and values.stride(1) == 1)
        a_norm = norm or addend_norm
        block = triton.next_power_of_2(width)
        add_norm_kernel[(min(num_tokens, _MAX_PROGRAMS),)](
            total,
            normed,
            residual,
            values,
            None if addend_norm is None else addend_norm.weight,
            None if norm is None else norm.weight,
            None if addend is None else addend.sum_scale,
            num_tokens,
            residual.stride(0),
            0 if values is None else values.stride(0),
            1.0 if addend is None else addend.scale,
            0.0 if a_norm is None else a_norm.eps,
            WIDTH=width,
            BLOCK=block,
            ADDS_ONE=a_norm is not None and a_norm.adds_one,
            num_warps=_num_warps(block, 8),
            enable_fp_fusion=True,
        )
        return total, normed

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        query_norm: Norm | None,
        key_norm: Norm | None,
        rotation: Rotation | None,
        cache: LayerCache,
        value_eps: float | None = None,
    ) -> torch.Tensor:
        num_tokens, width = qkv.shape
        _, _, num_kv_heads, head_dim = cache.keys.shape
        num_heads = width // head_dim - (2 * num_kv_heads if cache.slot_mapping is not None else 0)
        eps = value_eps if query_norm is None else query_norm.eps
        assert value_eps in (None, eps)
        assert head_dim % 2 == 0
        assert qkv.stride(1) == 1
        assert cache.keys.is_contiguous()
        assert cache.values.is_contiguous()
        query = qkv.new_empty(num_tokens, num_heads, head_dim)
        if num_tokens == 0:
            return query
        heads_padded, half_padded = triton.next_power_of_2(num_heads), triton.next_power_of_2(head_dim // 2)
        is_fp8 = cache.keys.dtype == FP8
        rotate_and_store_kernel[(num_tokens,)](
            query,
            cache.keys.view(torch.uint8) if is_fp8 else cache.keys,
            cache.values.view(torch.uint8) if is_fp8 else cache.values,
            1.0 / cache.key_scale if is_fp8 else None,
            1.0 / cache.value_scale if is_fp8 else None,
            qkv,
            None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight,
            None if rotation is None else rotation.table,
            None if rotation is None else rotation.positions,
            cache.slot_mapping,
            qkv.stride(0),
            eps or 0.0,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HEADS_PADDED=heads_padded,
            KV_HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
            HALF_PADDED=half_padded,
            NORMS_EACH_HEAD=query_norm is not None and query_norm.weight.shape[0] == head_dim,
            ADDS_ONE=query_norm is not None and query_norm.adds_one,
            NORMS_VALUES=value_eps is not None,
            num_warps=_num_warps(2 * heads_padded * half_padded, 16),
            enable_fp_fusion=True,
        )
        return query

    def rotate_and_store_latents(
        self,
        query: torch.Tensor,
        rotated: torch.Tensor,
        latent: torch.Tensor,
        norm: Norm,
        rotation: Rotation | None,
        cache: LatentCache,
    ) -> None:
        num_tokens, num_heads, rope_dim = rotated.shape
        rank = norm.weight.shape[0]
        assert rope_dim % 2 == 0
        assert rotated.stride(2) == latent.stride(1) == 1
        assert query.is_contiguous()
        assert cache.latents.is_contiguous()
        if num_tokens == 0:
            return
        rank_padded, heads_padded = triton.next_power_of_2(rank), triton.next_power_of_2(num_heads)
        half_padded = triton.next_power_of_2(rope_dim // 2)
        rotate_and_store_latents_kernel[(num_tokens,)](
            query,
            cache.latents,
            rotated,
            latent,
            norm.weight,
            None if rotation is None else rotation.table,
            None if rotation is None else rotation.positions,
            cache.slot_mapping,
            *rotated.stride()[:2],
            latent.stride(0),
            norm.eps,
            NUM_HEADS=num_heads,
            RANK=rank,
            ROPE_DIM=rope_dim,
            HEADS_PADDED=heads_padded,
            RANK_PADDED=rank_padded,
            HALF_PADDED=half_padded,
            num_warps=_num_warps(max(2 * heads_padded * half_padded, rank_padded), 16),
            enable_fp_fusion=True,
        )

    def gated_activation(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        assert gate_up.stride(1) == 1
        num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty(num_tokens, width)
        if num_tokens:
            gated_activation_kernel[num_tokens, triton.cdiv(width, _ACTIVATION_BLOCK)](
                output,
                gate_up,
                gate_up.stride(0),
                WIDTH=width,
                BLOCK=_ACTIVATION_BLOCK,
                IS_GELU=activation == "gelu_tanh",
                enable_fp_fusion=True,
            )
        return output


def _num_warps(num_elements: int, of_thread: int) -> int:
    """Return the warps of a program that holds a row; a thread holds ``of_thread`` elements, or more of a long row.

    With 16 for norms, ptxas would spill registers of some variants to fit more programs on a multiprocessor.
    """
    warps: int = triton.next_power_of_2(num_elements) // (32 * of_thread)
    return min(max(warps, 1), 16)
