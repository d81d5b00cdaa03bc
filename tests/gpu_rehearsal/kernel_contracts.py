"""The contracts of the kernels of attention and the cache write: what a launch must pass, and what it computes.

Each function here checks a launch and returns what computes its result. A launch that breaks its contract would read or
write wrong memory on a GPU, mostly without an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from kernels.attention import reference as attention_reference
from kernels.attention.base import AttentionInputs
from kernels.attention_metadata import AttentionMetadata

__all__ = ["CONTRACTS", "Compute", "Contract", "ContractError", "check_metadata", "plain", "require", "require_tensor"]


Compute = Callable[[], object]
Contract = Callable[[Any, tuple[int, ...]], Compute]


class ContractError(AssertionError):
    """A kernel was launched with arguments that its documentation forbids."""


def require(condition: object, message: str) -> None:
    """Raise ContractError with the message unless the condition holds."""
    if not condition:
        raise ContractError(message)


def plain(tensor: Any) -> torch.Tensor:
    """Return the data of a tensor on a simulated GPU."""
    data: torch.Tensor = tensor.data_on_host
    return data


def require_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    """Require a dtype and a shape; None is any size."""
    require(tensor.dtype == dtype, f"{name} is {tensor.dtype}, and must be {dtype}")
    fits = len(tensor.shape) == len(shape) and all(
        wanted in (None, size) for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    require(fits, f"{name} has shape {tuple(tensor.shape)}, and must have {shape}")


# --- store_kvcache -------------------------------------------------------------------------------------------------


def store(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.store_kvcache."""
    num_tokens, num_heads, head_dim = call.key.shape
    _, block_size, *_ = call.key_cache.shape
    for name in ("key", "value"):
        cache = getattr(call, f"{name}_cache")
        require_tensor(name, getattr(call, name), cache.dtype, num_tokens, num_heads, head_dim)
        require_tensor(f"{name}_cache", cache, call.key_cache.dtype, None, block_size, num_heads, head_dim)
        require(cache.is_contiguous(), f"{name}_cache is not contiguous")
        strides = tuple(getattr(call, f"{name}_{kind}_stride") for kind in ("token", "head", "dim"))
        require(strides == getattr(call, name).stride(), f"the strides {strides} are not those of {name}")
    require_tensor("slot_mapping", call.slot_mapping, torch.int64, num_tokens)
    require(call.slot_mapping.is_contiguous(), "slot_mapping is not contiguous")
    require(tuple(grid) == (num_tokens,), f"the grid {grid} is not one program for each of {num_tokens} tokens")
    require((num_heads, head_dim) == (call.NUM_KV_HEADS, call.HEAD_DIM), "constants do not match the cache")
    slots, num_slots = plain(call.slot_mapping), call.key_cache.shape[0] * block_size
    require(bool(((slots >= -1) & (slots < num_slots)).all()), f"slot_mapping leaves the {num_slots} slots")

    def compute() -> None:
        written = slots >= 0
        for name in ("key", "value"):
            cache = plain(getattr(call, f"{name}_cache")).view(num_slots, num_heads, head_dim)
            cache[slots[written]] = plain(getattr(call, name))[written]

    return compute


# --- attention -----------------------------------------------------------------------------------------------------


def check_metadata(
    metadata: AttentionMetadata, num_tokens: int, num_blocks: int, block_size: int, first_token: int = 0
) -> None:
    """Check a batch as AttentionMetadata documents it, the values of its tensors included.

    Args:
        metadata: the batch, or the part of it that a launch computes.
        num_tokens: queries of the batch.
        num_blocks: blocks of the cache.
        block_size: tokens per block.
        first_token: index of the first query of ``metadata``.
    """
    num_seqs = metadata.num_seqs
    require_tensor("cu_seqlens_q", metadata.cu_seqlens_q, torch.int32, num_seqs + 1)
    require_tensor("seq_lens", metadata.seq_lens, torch.int32, num_seqs)
    require_tensor("block_tables", metadata.block_tables, torch.int32, num_seqs, None)
    for name in ("cu_seqlens_q", "seq_lens", "block_tables"):
        require(getattr(metadata, name).stride(-1) == 1, f"{name} is not contiguous")
    bounds, seq_lens = plain(metadata.cu_seqlens_q).tolist(), plain(metadata.seq_lens).tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    require(
        bounds[0] == first_token and bounds[-1] <= num_tokens, f"cu_seqlens_q {bounds} leaves the {num_tokens} queries"
    )
    require(min(lengths) >= 0, f"cu_seqlens_q {bounds} descends")
    decode_lengths = set(lengths[: metadata.num_decodes])
    require(decode_lengths <= {1}, f"num_decodes is {metadata.num_decodes} of sequences with {lengths} queries")
    require(max(lengths) <= metadata.max_query_len, f"max_query_len {metadata.max_query_len} < {max(lengths)}")
    require(max(seq_lens) <= metadata.max_seq_len, f"max_seq_len {metadata.max_seq_len} < {max(seq_lens)}")
    tables = plain(metadata.block_tables)
    require(bool(((tables >= -1) & (tables < num_blocks)).all()), f"block_tables names a block outside {num_blocks}")
    width = tables.shape[1] * block_size
    require(max(seq_lens) <= width, f"a sequence of {max(seq_lens)} tokens has a block table for {width}")


def _metadata(call: Any) -> AttentionMetadata:
    """Build the batch from a launch's arguments; the two lengths are not passed to kernels."""
    require_tensor("cu_seqlens_q", call.cu_seqlens_q, torch.int32, call.seq_lens.shape[0] + 1)
    lengths = plain(call.cu_seqlens_q).diff()
    return AttentionMetadata(
        slot_mapping=call.cu_seqlens_q,
        cu_seqlens_q=call.cu_seqlens_q,
        seq_lens=call.seq_lens,
        block_tables=call.block_tables,
        num_decodes=0,
        max_query_len=int(lengths.max()),
        max_seq_len=int(plain(call.seq_lens).max()),
    )


def _check_attention(call: Any, grid: tuple[int, ...], first_token: int = 0) -> AttentionMetadata:
    """Check what both attention kernels take."""
    query, cache = call.query, call.key_cache
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, block_size, num_kv_heads, _ = cache.shape
    for name in ("key_cache", "value_cache"):
        require_tensor(name, getattr(call, name), query.dtype, num_blocks, block_size, num_kv_heads, head_dim)
        require(getattr(call, name).is_contiguous(), f"{name} is not contiguous")
    require(query.stride(2) == 1, "query is not contiguous in its last dimension")
    require((call.query_token_stride, call.query_head_stride) == query.stride()[:2], "not the strides of query")
    require((call.slot_stride, call.kv_head_stride) == cache.stride()[1:3], "not the strides of the cache")
    require(call.table_stride == call.block_tables.stride(0), "not the stride of block_tables")
    constants = (call.GROUP_SIZE, call.BLOCK_SIZE, call.HEAD_DIM)
    require(constants == (num_heads // num_kv_heads, block_size, head_dim), f"constants {constants} do not match")
    require(max(16, head_dim) <= call.DIM_PADDED, f"DIM_PADDED {call.DIM_PADDED} is too small")
    require(max(16, call.GROUP_SIZE) <= call.ROWS and call.TILE >= 16, "a tile is smaller than tl.dot takes")
    require(grid[1] == num_kv_heads, f"the grid {grid} does not have a program for each KV head")
    metadata = _metadata(call)
    check_metadata(metadata, num_tokens, num_blocks, block_size, first_token)
    return metadata


def _attended(call: Any, metadata: AttentionMetadata) -> torch.Tensor:
    batch = AttentionMetadata(
        **{name: plain(getattr(metadata, name)) for name in ("slot_mapping", "cu_seqlens_q", "seq_lens")},
        block_tables=plain(metadata.block_tables),
        num_decodes=0,
        max_query_len=metadata.max_query_len,
        max_seq_len=metadata.max_seq_len,
    )
    tensors = (plain(one) for one in (call.query, call.key_cache, call.value_cache))
    return attention_reference.attention(AttentionInputs(*tensors, batch, call.scale, call.WINDOW or None))


def mixed(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.attention.triton_kernels.mixed_kernel."""
    metadata = _check_attention(call, grid, call.first_token)
    _check_output(call)
    require(call.num_seqs == metadata.num_seqs, f"num_seqs {call.num_seqs} is not {metadata.num_seqs}")
    queries = call.ROWS // call.GROUP_SIZE
    bounds = plain(call.cu_seqlens_q).tolist()
    tiles = [start // queries + i - (start - end) // queries for i, (start, end) in enumerate(pairwise(bounds))]
    needed = max(tiles) - call.first_token // queries
    require(needed <= grid[0], f"{grid[0]} tiles do not cover the queries, which need {needed}")
    own = slice(bounds[0], bounds[-1])
    return lambda: plain(call.output)[own].copy_(_attended(call, metadata)[own])


def split_decode(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.attention.triton_kernels.split_decode_kernel: here the first split sees all keys."""
    metadata = _check_attention(call, grid)
    num_tokens, num_heads, head_dim = call.query.shape
    shape = (metadata.num_seqs, num_heads, call.NUM_SPLITS)
    require_tensor("split_output", call.split_output, torch.float32, *shape, head_dim)
    require_tensor("split_lse", call.split_lse, torch.float32, *shape)
    require(call.split_output.is_contiguous() and call.split_lse.is_contiguous(), "splits are not contiguous")
    require(metadata.max_query_len <= 1, "a sequence has more than one query")
    require(tuple(grid) == (metadata.num_seqs, call.key_cache.shape[2], call.NUM_SPLITS), f"grid {grid}")

    def compute() -> None:
        first = plain(call.cu_seqlens_q)[:-1].long().clamp(max=num_tokens - 1)
        plain(call.split_output).zero_()[:, :, 0] = _attended(call, metadata)[first].float()
        plain(call.split_lse).fill_(-torch.inf)[:, :, 0] = 0.0

    return compute


def reduce_splits(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.attention.triton_kernels.reduce_splits_kernel."""
    _check_output(call)
    num_seqs, num_heads, num_splits, head_dim = call.split_output.shape
    require_tensor("split_output", call.split_output, torch.float32, None, call.output.shape[1], None, head_dim)
    require_tensor("split_lse", call.split_lse, torch.float32, num_seqs, num_heads, num_splits)
    require_tensor("cu_seqlens_q", call.cu_seqlens_q, torch.int32, num_seqs + 1)
    require((head_dim, num_splits) == (call.HEAD_DIM, call.NUM_SPLITS), "constants do not match the splits")
    require(num_splits & (num_splits - 1) == 0, f"NUM_SPLITS {num_splits} is not a power of two")
    require(tuple(grid) == (num_seqs, num_heads), f"the grid {grid} is not one program for each head")

    def compute() -> None:
        weights = torch.softmax(plain(call.split_lse) * math.log(2.0), dim=-1)
        combined = (plain(call.split_output) * weights.unsqueeze(-1)).sum(dim=2)
        for sequence, (start, end) in enumerate(pairwise(plain(call.cu_seqlens_q).tolist())):
            if end > start:
                plain(call.output)[start] = combined[sequence].to(call.output.dtype)

    return compute


def _check_output(call: Any) -> None:
    require(call.output.stride(2) == 1, "output is not contiguous in its last dimension")
    require((call.output_token_stride, call.output_head_stride) == call.output.stride()[:2], "not output's strides")
    if hasattr(call, "query"):
        require_tensor("output", call.output, call.query.dtype, *call.query.shape)


CONTRACTS: dict[str, Contract] = {
    "_store_kernel": store,
    "mixed_kernel": mixed,
    "split_decode_kernel": split_decode,
    "reduce_splits_kernel": reduce_splits,
}
