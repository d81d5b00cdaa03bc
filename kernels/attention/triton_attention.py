"""Paged attention on a GPU without flash-attn: which Triton kernel runs, and how large its grid and tiles are.

Every launch parameter follows from shapes, max_query_len and max_seq_len, never from what a tensor holds, so a step
can be captured in a CUDA graph and replayed with other lengths. The arithmetic is in triton_kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from kernels.attention.base import AttentionBackend, AttentionMetadata
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

    def check_block_size(self, block_size: int) -> None:
        if block_size < 1 or block_size & (block_size - 1):
            nearest = max(1, 1 << max(block_size, 1).bit_length() - 1)
            raise ValueError(
                f"block_size={block_size} is not a power of two, which the triton attention backend needs; "
                f"use {nearest} or {2 * nearest}"
            )

    def forward(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        assert key_cache.is_contiguous()
        assert value_cache.is_contiguous()
        if query.stride(-1) != 1:
            query = query.contiguous()
        # Rows that belong to no sequence, as in a padded CUDA graph, are written by no program.
        output = query.new_zeros(query.shape)
        if query.shape[0] == 0:
            return output
        inputs = _Inputs(query, key_cache, value_cache, metadata, scale, sliding_window)
        num_splits = _num_splits(inputs)
        if num_splits > 1:
            _launch_split_decode(output, inputs, num_splits)
        else:
            _launch_mixed(output, inputs)
        return output


@dataclass(frozen=True)
class _Inputs:
    """The arguments of one forward, and what the kernels derive from their shapes."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: AttentionMetadata
    scale: float
    sliding_window: int | None

    @property
    def num_seqs(self) -> int:
        return self.metadata.seq_lens.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.key_cache.shape[2]

    @property
    def group_size(self) -> int:
        return self.query.shape[1] // self.num_kv_heads

    @property
    def dim_padded(self) -> int:
        return max(_MIN_DOT, _next_power_of_2(self.query.shape[2]))

    @property
    def constants(self) -> dict[str, int]:
        """The compile-time arguments that both attention kernels take."""
        return {
            "GROUP_SIZE": self.group_size,
            "WINDOW": self.sliding_window or 0,
            "BLOCK_SIZE": self.key_cache.shape[1],
            "HEAD_DIM": self.query.shape[2],
            "DIM_PADDED": self.dim_padded,
            "TILE": max(_MIN_DOT, min(64, 16384 // self.bytes_per_key)),
        }

    @property
    def bytes_per_key(self) -> int:
        return self.dim_padded * self.query.element_size()


def _num_splits(inputs: _Inputs) -> int:
    """Return over how many programs a decode's context is split: 1 for mixed steps and where there is work enough."""
    if inputs.metadata.max_query_len > 1:
        return 1
    span = min(inputs.metadata.max_seq_len, inputs.sliding_window or inputs.metadata.max_seq_len)
    programs = _PROGRAMS_PER_MULTIPROCESSOR * _num_multiprocessors(inputs.query.device)
    wanted = min(programs // (inputs.num_seqs * inputs.num_kv_heads), span // _MIN_KEYS_PER_SPLIT, _MAX_SPLITS)
    return 1 if wanted < 2 else 1 << (wanted.bit_length() - 1)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _MULTIPROCESSORS_INTERPRETED
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _rows_per_tile(inputs: _Inputs) -> int:
    smallest = max(_MIN_DOT, _next_power_of_2(inputs.group_size))
    wanted = _next_power_of_2(inputs.metadata.max_query_len * inputs.group_size)
    # The largest tile whose sums stay in registers; float32 products, without tensor cores, need the most.
    largest = 32 if inputs.query.dtype == torch.float32 else 128 if inputs.dim_padded <= 128 else 64
    return max(smallest, min(wanted, largest))


def _launch_mixed(output: torch.Tensor, inputs: _Inputs) -> None:
    query, key_cache, metadata = inputs.query, inputs.key_cache, inputs.metadata
    rows = _rows_per_tile(inputs)
    max_tiles = query.shape[0] // (rows // inputs.group_size) + inputs.num_seqs
    mixed_kernel[(max_tiles, inputs.num_kv_heads)](
        output,
        query,
        key_cache,
        inputs.value_cache,
        metadata.cu_seqlens_q,
        metadata.seq_lens,
        metadata.block_tables,
        inputs.scale,
        inputs.num_seqs,
        *query.stride()[:2],
        *output.stride()[:2],
        *key_cache.stride()[1:3],
        metadata.block_tables.stride(0),
        **inputs.constants,
        ROWS=rows,
        **_launch_options(rows),
    )


def _launch_split_decode(output: torch.Tensor, inputs: _Inputs, num_splits: int) -> None:
    query, key_cache, metadata = inputs.query, inputs.key_cache, inputs.metadata
    num_heads, head_dim = query.shape[1:]
    partial_shape = (inputs.num_seqs, num_heads, num_splits)
    partial_output = query.new_empty((*partial_shape, head_dim), dtype=torch.float32)
    partial_lse = query.new_empty(partial_shape, dtype=torch.float32)
    rows = _rows_per_tile(inputs)
    split_decode_kernel[(inputs.num_seqs, inputs.num_kv_heads, num_splits)](
        partial_output,
        partial_lse,
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
        **inputs.constants,
        ROWS=rows,
        NUM_SPLITS=num_splits,
        **_launch_options(rows),
    )
    reduce_splits_kernel[(inputs.num_seqs, num_heads)](
        output,
        partial_output,
        partial_lse,
        metadata.cu_seqlens_q,
        *output.stride()[:2],
        HEAD_DIM=head_dim,
        DIM_PADDED=inputs.dim_padded,
        NUM_SPLITS=num_splits,
    )


def _launch_options(rows: int) -> dict[str, Any]:
    return {"num_warps": 8 if rows >= 128 else 4, "num_stages": 2}


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
