"""Paged attention on a GPU without flash-attn: launches the Triton kernels on a step's tensors.

Every launch parameter follows from shapes, num_decodes, max_query_len and max_seq_len, never from what a tensor holds,
so a step can be captured in a CUDA graph and replayed with other lengths. triton_launch.py chooses the kernel and its
tiles; the arithmetic is in triton_kernels.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from triton import knobs

from kernels.attention.base import AttentionBackend, AttentionInputs, StepLimits
from kernels.attention.triton_kernels import mixed_kernel, reduce_splits_kernel, split_decode_kernel
from kernels.attention.triton_launch import LaunchConfig, LayerShape, batches_of_every_launch, choose_launch
from kernels.attention_metadata import AttentionMetadata

_NUM_STAGES = 2  # the software pipeline's depth
_MULTIPROCESSORS_INTERPRETED = 16  # what the interpreter pretends to have, so that tests see several splits


class TritonBackend(AttentionBackend):
    """Any head_dim up to 256, any number of query heads a KV head, any block size that is a power of two."""

    name: ClassVar[str] = "triton"
    default_block_size: ClassVar[int] = 16

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
        assert inputs.key_cache.is_contiguous()
        assert inputs.value_cache.is_contiguous()
        assert inputs.softcap is None
        assert inputs.sinks is None
        if inputs.query.stride(-1) != 1:
            inputs = replace(inputs, query=inputs.query.contiguous())
        # Rows that belong to no sequence, as in a padded CUDA graph, are written by no program.
        output = inputs.query.new_zeros(inputs.query.shape)
        if output.shape[0] == 0:
            return output
        layer = _layer_shape(inputs)
        # A launch for the decodes, which are split over their contexts, and one for prefills, whose tiles are larger.
        for part in _parts(inputs.metadata, num_tokens=output.shape[0]):
            launch = choose_launch(
                layer, num_seqs=part.num_seqs, max_query_len=part.max_query_len, max_seq_len=part.max_seq_len
            )
            if launch.num_splits > 1:
                _launch_split_decode(output, inputs, part, layer, launch)
            else:
                _launch_mixed(output, inputs, part, layer, launch)
        return output

    def warm_up_batches(self, limits: StepLimits) -> list[tuple[int, int]]:
        layers = {
            LayerShape(
                group_size=limits.num_heads // limits.num_kv_heads,
                num_kv_heads=limits.num_kv_heads,
                head_dim=limits.head_dim,
                element_size=limits.dtype.itemsize,
                sliding_window=window,
                num_multiprocessors=_num_multiprocessors(limits.device),
            )
            for window in limits.sliding_windows
        }
        return batches_of_every_launch(layers, max_query_len=limits.max_query_len, max_seq_len=limits.max_seq_len)


@dataclass(frozen=True, slots=True)
class _Part:
    """Sequences of the batch that one launch computes: the decodes, or those after them."""

    first_token: int  # index of their first query
    end_token: int  # index after their last query, or after padding behind it
    cu_seqlens_q: torch.Tensor  # int32 [num_seqs + 1], indices of the whole batch's queries
    seq_lens: torch.Tensor  # int32 [num_seqs]
    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks]
    max_query_len: int
    max_seq_len: int

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]


def _parts(metadata: AttentionMetadata, num_tokens: int) -> Iterator[_Part]:
    """Yield the decodes and the other sequences; a batch often has sequences of one kind only."""
    num_decodes, num_seqs = metadata.num_decodes, metadata.num_seqs
    parts = ((0, num_decodes, num_decodes, 1), (num_decodes, num_seqs, num_tokens, metadata.max_query_len))
    for start, end, end_token, max_query_len in parts:
        if start < end:
            yield _Part(
                first_token=start,  # each sequence before has one query
                end_token=end_token,
                cu_seqlens_q=metadata.cu_seqlens_q[start : end + 1],
                seq_lens=metadata.seq_lens[start:end],
                block_tables=metadata.block_tables[start:end],
                max_query_len=max_query_len,
                max_seq_len=metadata.max_seq_len,
            )


def _layer_shape(inputs: AttentionInputs) -> LayerShape:
    return LayerShape(
        group_size=inputs.group_size,
        num_kv_heads=inputs.num_kv_heads,
        head_dim=inputs.head_dim,
        element_size=inputs.query.element_size(),
        sliding_window=inputs.sliding_window,
        num_multiprocessors=_num_multiprocessors(inputs.query.device),
    )


def _constants(inputs: AttentionInputs, layer: LayerShape) -> dict[str, int]:
    """Return the compile-time arguments of both attention kernels that are the same in every step."""
    return {
        "GROUP_SIZE": layer.group_size,
        "WINDOW": layer.sliding_window or 0,
        "BLOCK_SIZE": inputs.block_size,
        "HEAD_DIM": layer.head_dim,
        "DIM_PADDED": layer.dim_padded,
        "TILE": layer.keys_per_tile,
    }


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _MULTIPROCESSORS_INTERPRETED
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _launch_mixed(
    output: torch.Tensor, inputs: AttentionInputs, part: _Part, layer: LayerShape, launch: LaunchConfig
) -> None:
    query, key_cache = inputs.query, inputs.key_cache
    queries_per_tile = launch.rows // layer.group_size
    max_tiles = part.end_token // queries_per_tile - part.first_token // queries_per_tile + part.num_seqs
    mixed_kernel[(max_tiles, inputs.num_kv_heads)](
        output,
        query,
        key_cache,
        inputs.value_cache,
        part.cu_seqlens_q,
        part.seq_lens,
        part.block_tables,
        inputs.scale,
        part.first_token,
        part.num_seqs,
        *query.stride()[:2],
        *output.stride()[:2],
        *key_cache.stride()[1:3],
        part.block_tables.stride(0),
        **_constants(inputs, layer),
        ROWS=launch.rows,
        num_warps=launch.num_warps,
        num_stages=_NUM_STAGES,
    )


def _launch_split_decode(
    output: torch.Tensor, inputs: AttentionInputs, part: _Part, layer: LayerShape, launch: LaunchConfig
) -> None:
    query, key_cache = inputs.query, inputs.key_cache
    num_splits = launch.num_splits
    split_shape = (part.num_seqs, inputs.num_heads, num_splits)
    split_output = query.new_empty((*split_shape, inputs.head_dim), dtype=torch.float32)
    split_lse = query.new_empty(split_shape, dtype=torch.float32)
    split_decode_kernel[(part.num_seqs, inputs.num_kv_heads, num_splits)](
        split_output,
        split_lse,
        query,
        key_cache,
        inputs.value_cache,
        part.cu_seqlens_q,
        part.seq_lens,
        part.block_tables,
        inputs.scale,
        *query.stride()[:2],
        *key_cache.stride()[1:3],
        part.block_tables.stride(0),
        **_constants(inputs, layer),
        ROWS=launch.rows,
        NUM_SPLITS=num_splits,
        num_warps=launch.num_warps,
        num_stages=_NUM_STAGES,
    )
    reduce_splits_kernel[(part.num_seqs, inputs.num_heads)](
        output,
        split_output,
        split_lse,
        part.cu_seqlens_q,
        *output.stride()[:2],
        HEAD_DIM=inputs.head_dim,
        DIM_PADDED=layer.dim_padded,
        NUM_SPLITS=num_splits,
    )
