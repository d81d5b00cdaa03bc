"""Paged attention on a GPU without flash-attn: chooses the Triton kernel, its grid and its tiles.

Every launch parameter follows from shapes, max_query_len and max_seq_len, never from what a tensor holds, so a step
can be captured in a CUDA graph and replayed with other lengths. The arithmetic is in triton_kernels.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
from triton import knobs

from kernels.attention.base import AttentionBackend, AttentionInputs
from kernels.attention.triton_kernels import mixed_kernel, reduce_splits_kernel, split_decode_kernel

_MIN_DOT = 16  # tl.dot takes no smaller dimension
_MIN_KEYS_PER_SPLIT = 256  # below this the reduction costs more than another program saves
_MAX_SPLITS = 64
_PROGRAMS_PER_MULTIPROCESSOR = 2
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
        if inputs.query.stride(-1) != 1:
            inputs = replace(inputs, query=inputs.query.contiguous())
        # Rows that belong to no sequence, as in a padded CUDA graph, are written by no program.
        output = inputs.query.new_zeros(inputs.query.shape)
        if output.shape[0] == 0:
            return output
        num_splits = _num_splits(inputs)
        if num_splits > 1:
            _launch_split_decode(output, inputs, num_splits)
        else:
            _launch_mixed(output, inputs)
        return output


def _dim_padded(inputs: AttentionInputs) -> int:
    return max(_MIN_DOT, _next_power_of_2(inputs.head_dim))


def _constants(inputs: AttentionInputs) -> dict[str, int]:
    """Return the compile-time arguments that both attention kernels take."""
    dim_padded = _dim_padded(inputs)
    bytes_per_key = dim_padded * inputs.query.element_size()
    return {
        "GROUP_SIZE": inputs.group_size,
        "WINDOW": inputs.sliding_window or 0,
        "BLOCK_SIZE": inputs.block_size,
        "HEAD_DIM": inputs.head_dim,
        "DIM_PADDED": dim_padded,
        "TILE": max(_MIN_DOT, min(64, 16384 // bytes_per_key)),
    }


def _num_splits(inputs: AttentionInputs) -> int:
    """Return the number of programs that share a decode's context: 1 for mixed steps and for large enough batches."""
    if inputs.metadata.max_query_len > 1:
        return 1
    span = min(inputs.metadata.max_seq_len, inputs.sliding_window or inputs.metadata.max_seq_len)
    programs = _PROGRAMS_PER_MULTIPROCESSOR * _num_multiprocessors(inputs.query.device)
    wanted = min(programs // (inputs.metadata.num_seqs * inputs.num_kv_heads), span // _MIN_KEYS_PER_SPLIT, _MAX_SPLITS)
    return 1 if wanted < 2 else 1 << (wanted.bit_length() - 1)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _MULTIPROCESSORS_INTERPRETED
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _rows_per_tile(inputs: AttentionInputs) -> int:
    smallest = max(_MIN_DOT, _next_power_of_2(inputs.group_size))
    wanted = _next_power_of_2(inputs.metadata.max_query_len * inputs.group_size)
    # The largest tile whose sums stay in registers; float32 products, without tensor cores, need the most.
    largest = 32 if inputs.query.dtype == torch.float32 else 128 if _dim_padded(inputs) <= 128 else 64
    return max(smallest, min(wanted, largest))


def _launch_mixed(output: torch.Tensor, inputs: AttentionInputs) -> None:
    query, key_cache, metadata = inputs.query, inputs.key_cache, inputs.metadata
    rows = _rows_per_tile(inputs)
    max_tiles = query.shape[0] // (rows // inputs.group_size) + metadata.num_seqs
    mixed_kernel[(max_tiles, inputs.num_kv_heads)](
        output,
        query,
        key_cache,
        inputs.value_cache,
        metadata.cu_seqlens_q,
        metadata.seq_lens,
        metadata.block_tables,
        inputs.scale,
        metadata.num_seqs,
        *query.stride()[:2],
        *output.stride()[:2],
        *key_cache.stride()[1:3],
        metadata.block_tables.stride(0),
        **_constants(inputs),
        ROWS=rows,
        **_launch_options(rows),
    )


def _launch_split_decode(output: torch.Tensor, inputs: AttentionInputs, num_splits: int) -> None:
    query, key_cache, metadata = inputs.query, inputs.key_cache, inputs.metadata
    split_shape = (metadata.num_seqs, inputs.num_heads, num_splits)
    split_output = query.new_empty((*split_shape, inputs.head_dim), dtype=torch.float32)
    split_lse = query.new_empty(split_shape, dtype=torch.float32)
    rows = _rows_per_tile(inputs)
    split_decode_kernel[(metadata.num_seqs, inputs.num_kv_heads, num_splits)](
        split_output,
        split_lse,
        query,
        key_cache,
        inputs.value_cache,
        metadata.cu_seqlens_q,
        metadata.seq_lens,
        metadata.block_tables,
        inputs.scale,
        *query.stride()[:2],
        *key_cache.stride()[1:3],
        metadata.block_tables.stride(0),
        **_constants(inputs),
        ROWS=rows,
        NUM_SPLITS=num_splits,
        **_launch_options(rows),
    )
    reduce_splits_kernel[(metadata.num_seqs, inputs.num_heads)](
        output,
        split_output,
        split_lse,
        metadata.cu_seqlens_q,
        *output.stride()[:2],
        HEAD_DIM=inputs.head_dim,
        DIM_PADDED=_dim_padded(inputs),
        NUM_SPLITS=num_splits,
    )


def _launch_options(rows: int) -> dict[str, Any]:
    return {"num_warps": 8 if rows >= 128 else 4, "num_stages": 2}


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
