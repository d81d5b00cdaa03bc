"""Paged attention on a GPU without flash-attn: launches the Triton kernels on a step's tensors.

Every launch parameter follows from shapes, num_decodes and max_seq_len, never from what a tensor holds. So a step can
be captured in a CUDA graph and replayed with other lengths. The arithmetic is in prefill.py and decode.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from triton import knobs

from kernels.attention.base import AttentionBackend, AttentionInputs, StepLimits
from kernels.attention.step_cache import StepCache
from kernels.attention.triton.decode import plan_splits_kernel, reduce_splits_kernel, split_decode_kernel
from kernels.attention.triton.layer_shape import KEYS_PER_SPLIT, LayerShape, heads_per_tile, most_splits
from kernels.attention.triton.prefill import prefill_kernel
from kernels.attention.triton.sparse import sparse_attention_triton
from kernels.attention.window import Window, sliding_and_chunk
from kernels.attention_metadata import AttentionMetadata
from kernels.shared_memory import has_large_shared_memory

__all__ = ["TritonBackend", "shape_of"]

_FEW_STAGES = 2  # of prefills on GPUs whose programs get little shared memory
_DECODE_WARPS = 4
_DECODE_STAGES = 5  # the software pipeline's depth, as LayerShape.prefill_stages
# Of elements of 32 bits, and of latents. Else ptxas spills a register of some variants to fit more programs than shared
# memory does.
_MANY_REGISTERS = "--register-usage-level 0"
_SPLITS_PER_LOAD = 16  # when they are added up
_PLAN_LANES = 64  # sequences whose splits are listed at once
_MULTIPROCESSORS_INTERPRETED = 16  # what the interpreter pretends to have


@dataclass(frozen=True, slots=True)
class _SplitPlan:
    """The splits of a step's decodes, for all layers with one window and as many keys in a tile; see decode.py."""

    first_item: torch.Tensor  # int32 [num_decodes + 1]
    item_sequences: torch.Tensor  # int32 [items, at most]


class TritonBackend(AttentionBackend):
    """Any head_dim up to 512, any number of query heads a KV head, any block size that is a power of two."""

    name: ClassVar[str] = "triton"
    default_block_size: ClassVar[int] = 16
    captures_chunks: ClassVar[bool] = True
    expands_latents: ClassVar[bool] = True

    def __init__(self) -> None:
        self._plans: StepCache[tuple[Window | None, int, int], _SplitPlan] = StepCache()

    @classmethod
    def why_unusable(cls, device: torch.device) -> str | None:
        if knobs.runtime.interpret:
            return None
        reason = super().why_unusable(device)
        return reason and f"{reason}, or TRITON_INTERPRET=1 to test its kernels"

    def check_block_size(self, block_size: int) -> None:
        if block_size < 1 or block_size & (block_size - 1):
            nearest = max(1, 1 << max(block_size, 1).bit_length() - 1)
            raise ValueError(
                f"block_size={block_size} is not a power of two, which the triton attention backend needs; "
                f"use {nearest} or {2 * nearest}"
            )

    def forward(self, inputs: AttentionInputs) -> torch.Tensor:
        if inputs.topk_slots is not None:
            return sparse_attention_triton(inputs)
        _check_caches(inputs)
        assert inputs.sinks is None or inputs.sinks.is_contiguous()
        if inputs.query.stride(-1) != 1:
            inputs = replace(inputs, query=inputs.query.contiguous())
        output = inputs.query.new_empty(*inputs.query.shape[:2], inputs.value_dim)
        metadata, layer = inputs.metadata, _layer_shape(inputs)
        if inputs.is_fp8:
            inputs = _with_words(inputs)
        if metadata.num_decodes:
            key = layer.window, layer.keys_per_tile, layer.max_splits
            plan = self._plans.get(metadata, key, lambda: _plan_splits(metadata, layer))
            _launch_decodes(output, inputs, layer, plan)
        if metadata.num_decodes < metadata.num_seqs:
            _launch_prefills(output, inputs, layer)
        return output

    def warm_up_batches(self, limits: StepLimits) -> list[tuple[int, int]]:
        longest = limits.max_seq_len  # so that its splits are added up too
        # A chunk of one prompt token is not a decode, so the kernel of chunks is needed whatever the largest chunk is.
        return [(1, longest), (2, 2)] if longest > 1 else [(1, longest)]


def _check_caches(inputs: AttentionInputs) -> None:
    if inputs.rope_cache is None:
        assert inputs.key_cache.is_contiguous()
        assert inputs.has_latents or inputs.value_cache.is_contiguous()
    else:
        assert inputs.metadata.num_decodes == 0
        assert inputs.key_cache.stride() == inputs.value_cache.stride()
        assert inputs.key_cache.stride(0) == inputs.block_size * inputs.key_cache.stride(1)
        assert inputs.rope_cache.stride(0) == inputs.block_size * inputs.rope_cache.stride(1)
        assert inputs.key_cache.stride(3) == inputs.rope_cache.stride(3) == 1


def _layer_shape(inputs: AttentionInputs) -> LayerShape:
    if inputs.rope_cache is not None:
        return _shape_of_expanded(inputs, inputs.rope_cache.shape[3])
    heads = heads_per_tile(inputs.num_heads) if inputs.has_latents else inputs.group_size
    return shape_of(
        heads,
        inputs.num_heads // heads,
        inputs.value_dim,
        inputs.query.element_size(),
        inputs.window,
        inputs.head_dim - inputs.value_dim if inputs.has_latents else 0,
        inputs.is_fp8,
    )


def _shape_of_expanded(inputs: AttentionInputs, rope_dim: int) -> LayerShape:
    return shape_of(
        inputs.group_size,
        inputs.num_kv_heads,
        inputs.head_dim - rope_dim,
        inputs.query.element_size(),
        inputs.window,
        rope_dim,
        value_dim=inputs.value_dim,
    )


def _with_words(inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with caches of FP8 as words of two elements, and the keys' scale in that of the scores."""
    assert inputs.head_dim % 2 == 0
    key_words, value_words = (cache.view(torch.uint16) for cache in (inputs.key_cache, inputs.value_cache))
    return replace(inputs, key_cache=key_words, value_cache=value_words, scale=inputs.scale * inputs.key_scale)


shape_of = cache(LayerShape)  # one object for all layers and steps of a shape


def _split_constants(layer: LayerShape) -> dict[str, int]:
    """Return the compile-time arguments that divide a context."""
    return {
        **_window_constants(layer),
        "TILE": layer.keys_per_tile,
        "KEYS_PER_SPLIT": KEYS_PER_SPLIT,
        "MAX_SPLITS": layer.max_splits,
    }


def _window_constants(layer: LayerShape) -> dict[str, int]:
    """Return the compile-time arguments that say which keys a query sees."""
    return dict(zip(("WINDOW", "CHUNK"), sliding_and_chunk(layer.window), strict=True))


def _tile_constants(inputs: AttentionInputs, layer: LayerShape) -> dict[str, int]:
    """Return the compile-time arguments with which a program attends."""
    return {
        "GROUP_SIZE": layer.group_size,
        "BLOCK_SIZE": inputs.block_size,
        "HEAD_DIM": layer.head_dim,
        "DIM_PADDED": layer.dim_padded,
        "ROPE_DIM": layer.rope_dim,
        "ROPE_PADDED": layer.rope_padded,
    }


def _cache_strides(inputs: AttentionInputs) -> tuple[int, int]:
    """Return the elements or words from a slot to the next one, and from a KV head: tiles of heads share a latent."""
    slot_stride, head_stride = inputs.key_cache.stride()[1:3]
    return slot_stride, 0 if inputs.has_latents else head_stride


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _MULTIPROCESSORS_INTERPRETED
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _plan_splits(metadata: AttentionMetadata, layer: LayerShape) -> _SplitPlan:
    num_decodes = metadata.num_decodes
    lengths = metadata.seq_lens
    plan = _SplitPlan(
        first_item=lengths.new_empty(num_decodes + 1),
        item_sequences=lengths.new_empty(num_decodes * most_splits(layer, metadata.max_seq_len)),
    )
    plan_splits_kernel[(1,)](
        plan.first_item,
        plan.item_sequences,
        lengths,
        num_decodes,
        **_split_constants(layer),
        NUM_LANES=_PLAN_LANES,
        enable_fp_fusion=False,
    )
    return plan


def _launch_decodes(output: torch.Tensor, inputs: AttentionInputs, layer: LayerShape, plan: _SplitPlan) -> None:
    query, key_cache, metadata = inputs.query, inputs.key_cache, inputs.metadata
    most_items = plan.item_sequences.shape[0]
    # Without a second split nothing is stored there.
    num_stored = most_items if most_items > metadata.num_decodes else 0
    split_output = query.new_empty((num_stored, inputs.num_heads, layer.head_dim), dtype=torch.float32)
    split_lse = query.new_empty((num_stored, inputs.num_heads), dtype=torch.float32)
    programs = layer.decode_programs * _num_multiprocessors(query.device)
    split_decode_kernel[(min(most_items, max(1, programs // layer.num_kv_heads)), layer.num_kv_heads)](
        output,
        split_output,
        split_lse,
        plan.first_item,
        plan.item_sequences,
        query,
        key_cache,
        inputs.value_cache,
        metadata.seq_lens,
        metadata.block_tables,
        inputs.sinks,
        inputs.scale,
        inputs.softcap,
        inputs.value_scale if layer.is_fp8 else None,
        metadata.num_decodes,
        *query.stride()[:2],
        *output.stride()[:2],
        *_cache_strides(inputs),
        metadata.block_tables.stride(0),
        **_tile_constants(inputs, layer),
        **_split_constants(layer),
        ROWS=layer.decode_rows,
        num_warps=_DECODE_WARPS,
        num_stages=_DECODE_STAGES,
        maxnreg=layer.decode_registers,
        enable_fp_fusion=True,
        ptx_options=_MANY_REGISTERS if layer.element_size == 4 or layer.rope_dim else None,
    )
    if num_stored:
        reduce_splits_kernel[(metadata.num_decodes, inputs.num_heads)](
            output,
            split_output,
            split_lse,
            plan.first_item,
            inputs.sinks,
            *output.stride()[:2],
            HEAD_DIM=layer.head_dim,
            DIM_PADDED=layer.dim_padded,
            MAX_SPLITS=layer.max_splits,
            CHUNK=_SPLITS_PER_LOAD,
            enable_fp_fusion=True,
        )


def _launch_prefills(output: torch.Tensor, inputs: AttentionInputs, layer: LayerShape) -> None:
    """Compute the sequences after the decodes; a decode has one query."""
    query, key_cache, metadata = inputs.query, inputs.key_cache, inputs.metadata
    first = metadata.num_decodes
    num_seqs = metadata.num_seqs - first
    rows, rope_cache = layer.prefill_rows, inputs.rope_cache
    queries_per_tile = rows // layer.group_size
    max_tiles = query.shape[0] // queries_per_tile - first // queries_per_tile + num_seqs
    prefill_kernel[(max_tiles, layer.num_kv_heads)](
        output,
        query,
        key_cache,
        inputs.value_cache,
        rope_cache,
        metadata.cu_seqlens_q[first:],
        metadata.seq_lens[first:],
        metadata.block_tables[first:],
        inputs.sinks,
        inputs.scale,
        inputs.softcap,
        inputs.value_scale if layer.is_fp8 else None,
        first,
        num_seqs,
        *query.stride()[:2],
        *output.stride()[:2],
        *_cache_strides(inputs),
        0 if rope_cache is None else rope_cache.stride(1),
        metadata.block_tables.stride(0),
        **_tile_constants(inputs, layer),
        **_window_constants(layer),
        VALUE_DIM=layer.value_dim or layer.head_dim,
        VALUE_PADDED=layer.value_padded,
        TILE=layer.keys_per_tile,
        ROWS=rows,
        TWO_LOOPS=layer.has_small_heads and layer.window is None,
        num_warps=layer.prefill_warps,
        num_stages=layer.prefill_stages if has_large_shared_memory(query.device) else _FEW_STAGES,
        enable_fp_fusion=True,
        ptx_options=_MANY_REGISTERS if layer.element_size == 4 or layer.rope_dim else None,
    )
