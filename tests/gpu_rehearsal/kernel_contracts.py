"""The contracts of the kernels of attention and the cache write: what a launch must pass, and what it computes.

Each function here checks a launch and returns what computes its result. A launch that breaks its contract would read or
write wrong memory on a GPU, mostly without an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from kernels.attention import reference as attention_reference
from kernels.attention.base import AttentionInputs
from kernels.attention.window import Chunk, Window, first_key
from kernels.attention_metadata import AttentionMetadata
from kernels.cache import pages
from kernels.cache.fp8 import FP8, to_fp8
from kernels.cache.pending_tokens import take_pending_tokens

__all__ = [
    "CONTRACTS",
    "Compute",
    "Contract",
    "ContractError",
    "check_metadata",
    "plain",
    "require",
    "require_scales",
    "require_tensor",
]


Compute = Callable[[], object]
Contract = Callable[[Any, tuple[int, ...]], Compute]


class ContractError(AssertionError):
    """A kernel was launched with arguments that its documentation forbids."""


def require(condition: object, message: str) -> None:
    """Raise ContractError with the message unless the condition holds."""
    if not condition:
        raise ContractError(message)


def plain(tensor: Any) -> torch.Tensor:
    """Return the data of a tensor on a simulated GPU, or of a part of it."""
    data: torch.Tensor = getattr(tensor, "data_on_host", tensor)
    return data


def require_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    """Require a dtype and a shape; None is any size."""
    require(tensor.dtype == dtype, f"{name} is {tensor.dtype}, and must be {dtype}")
    fits = len(tensor.shape) == len(shape) and all(
        wanted in (None, size) for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    require(fits, f"{name} has shape {tuple(tensor.shape)}, and must have {shape}")


def require_scales(call: Any, dtype: torch.dtype) -> bool:
    """Return whether a launch writes caches of FP8, which need scales; others must have ``dtype``."""
    is_fp8: bool = call.key_cache.dtype == torch.uint8
    require(is_fp8 or call.key_cache.dtype == dtype, f"key_cache is {call.key_cache.dtype}, and must be {dtype}")
    for name in ("inverse_key_scale", "inverse_value_scale"):
        scale = getattr(call, name)
        require((scale is not None) == is_fp8, f"{name} is {scale}, and the cache is {call.key_cache.dtype}")
    return is_fp8


# --- store_kvcache -------------------------------------------------------------------------------------------------


def store(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.cache.store_kvcache."""
    num_tokens, num_heads, head_dim = call.key.shape
    _, block_size, *_ = call.key_cache.shape
    require((call.value is None) == (call.value_cache is None), "there are values without a cache, or the reverse")
    names = ("key",) if call.value is None else ("key", "value")
    is_fp8 = require_scales(call, call.key.dtype)
    for name in names:
        cache = getattr(call, f"{name}_cache")
        require_tensor(name, getattr(call, name), call.key.dtype, num_tokens, num_heads, head_dim)
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
        for name in names:
            cache = plain(getattr(call, f"{name}_cache")).view(num_slots, num_heads, head_dim)
            numbers = plain(getattr(call, name))[written]
            if is_fp8:
                numbers = to_fp8(numbers, 1.0 / getattr(call, f"inverse_{name}_scale")).view(torch.uint8)
            cache[slots[written]] = numbers

    return compute


# --- pending tokens --------------------------------------------------------------------------------------------------


def take_pending(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.cache.pending_tokens."""
    require_tensor("token_ids", call.token_ids, torch.int64, call.num_tokens)
    require_tensor("sampled", call.sampled, torch.int64, None)
    require(tuple(grid) == (-(-call.num_tokens // call.BLOCK),), f"the grid {grid} does not cover {call.num_tokens}")
    require(int(plain(call.token_ids).min()) >= -len(call.sampled), "a token id is of no sampled token")
    if call.HAS_STATES:
        require_tensor("state_slots", call.state_slots, torch.int32, call.num_tokens)

    def compute() -> None:
        state_slots = plain(call.state_slots) if call.HAS_STATES else None
        take_pending_tokens(plain(call.token_ids), plain(call.sampled), state_slots)

    return compute


# --- pages -----------------------------------------------------------------------------------------------------------


def copy_pages(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.cache.pages."""
    (num_parts, num_pages, num_words), pool, staging = call.pool.shape, plain(call.pool), plain(call.staging)
    require_tensor("page_ids", call.page_ids, torch.int64, None)
    require_tensor("staging", call.staging, call.pool.dtype, None, num_parts, num_words)
    require(call.pool.is_contiguous() and call.page_ids.is_contiguous(), "pool or page_ids is not contiguous")
    require(call.staging.stride()[1:] == (num_words, 1), "a page of staging is not contiguous")
    strides = (call.part_stride, call.page_stride, call.num_words)
    require(strides == (pool.stride(0), staging.stride(0), num_words), f"the strides {strides} are not the tensors'")
    page_ids = plain(call.page_ids)
    wanted = (len(page_ids), num_parts, -(-num_words // call.BLOCK))
    require(tuple(grid) == wanted, f"the grid {grid} is not one program for each of {wanted} blocks")
    require(len(page_ids) <= len(staging), f"staging has {len(staging)} pages, {len(page_ids)} are copied")
    require(bool(((page_ids >= 0) & (page_ids < num_pages)).all()), f"page_ids leaves the {num_pages} pages")
    if call.TO_STAGING:
        return lambda: pages.gather_pages(pool, page_ids, staging)
    require(len(page_ids.unique()) == len(page_ids), "a page is written twice")
    return lambda: pages.scatter_pages(staging, page_ids, pool)


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


def _check_attention(
    call: Any, grid: tuple[int, ...], cu_seqlens_q: torch.Tensor, first_token: int = 0, num_seqs: int | None = None
) -> AttentionMetadata:
    """Check what both attention kernels take; return the sequences that this one computes."""
    query, cache = call.query, call.key_cache
    num_tokens, num_heads, _ = query.shape
    num_blocks, block_size, *_ = cache.shape
    if getattr(call, "rope_cache", None) is not None:
        _check_expanded(call, grid)
    elif call.ROPE_DIM:
        _check_latents(call, grid)
    else:
        _check_keys_and_values(call, grid)
    require(query.stride(2) == 1, "query is not contiguous in its last dimension")
    require((call.query_token_stride, call.query_head_stride) == query.stride()[:2], "not the strides of query")
    require(call.slot_stride == cache.stride(1), "not the stride of the cache's slots")
    require(call.table_stride == call.block_tables.stride(0), "not the stride of block_tables")
    require(block_size == call.BLOCK_SIZE, f"BLOCK_SIZE {call.BLOCK_SIZE} is not that of the cache, {block_size}")
    require(num_heads == grid[1] * call.GROUP_SIZE, f"the grid {grid} does not have a program for each head")
    least = 16 if call.value_scale is None else 32  # of FP8 every second element is a tile
    require(max(least, call.HEAD_DIM) <= call.DIM_PADDED, f"DIM_PADDED {call.DIM_PADDED} is too small")
    require(max(16, call.GROUP_SIZE) <= call.ROWS and call.TILE >= 16, "a tile is smaller than tl.dot takes")
    own = slice(num_seqs)
    metadata = AttentionMetadata(
        slot_mapping=cu_seqlens_q,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=plain(call.seq_lens)[own],
        block_tables=plain(call.block_tables)[own],
        num_decodes=0,
        max_query_len=int(plain(cu_seqlens_q).diff().max()),
        max_seq_len=int(plain(call.seq_lens)[own].max()),
    )
    check_metadata(metadata, num_tokens, num_blocks, block_size, first_token)
    return metadata


def _check_keys_and_values(call: Any, grid: tuple[int, ...]) -> None:
    num_blocks, block_size, num_kv_heads, width = call.key_cache.shape
    is_fp8 = call.value_scale is not None
    head_dim = 2 * width if is_fp8 else width
    for name in ("key_cache", "value_cache"):
        tensor = getattr(call, name)
        dtype = torch.uint16 if is_fp8 else call.query.dtype
        require_tensor(name, tensor, dtype, num_blocks, block_size, num_kv_heads, width)
        require(tensor.is_contiguous(), f"{name} is not contiguous")
    require(call.kv_head_stride == call.key_cache.stride(2), "not the stride of the cache's heads")
    require(grid[1] == num_kv_heads, f"the grid {grid} does not have a program for each KV head")
    require(call.HEAD_DIM == head_dim == call.query.shape[2], f"HEAD_DIM {call.HEAD_DIM} is not {head_dim}")


def _check_latents(call: Any, grid: tuple[int, ...]) -> None:
    """Check keys whose beginnings are their values, and which all tiles of heads share."""
    num_blocks, block_size, _, width = call.key_cache.shape
    require_tensor("key_cache", call.key_cache, call.query.dtype, num_blocks, block_size, 1, width)
    require_tensor("value_cache", call.value_cache, call.query.dtype, num_blocks, block_size, 1, call.HEAD_DIM)
    require(call.key_cache.is_contiguous(), "key_cache is not contiguous")
    require(call.value_cache.data_ptr() == call.key_cache.data_ptr(), "a value is not the beginning of its key")
    require(call.value_cache.stride() == call.key_cache.stride(), "the values do not have the strides of the keys")
    require(call.kv_head_stride == 0, f"kv_head_stride is {call.kv_head_stride}, and all heads share a latent")
    widths = (call.HEAD_DIM + call.ROPE_DIM, call.query.shape[2])
    require(widths == (width, width), f"HEAD_DIM + ROPE_DIM and the queries have {widths}, a latent has {width}")
    require(max(16, call.ROPE_DIM) <= call.ROPE_PADDED, f"ROPE_PADDED {call.ROPE_PADDED} is too small")


def _check_expanded(call: Any, grid: tuple[int, ...]) -> None:
    """Check keys and values of expanded latents: both of a head beside each other, and the keys' rest in its cache."""
    num_blocks, block_size, num_kv_heads, _ = call.key_cache.shape
    widths = {"key_cache": (num_kv_heads, call.HEAD_DIM), "value_cache": (num_kv_heads, call.VALUE_DIM)}
    for name, width in (widths | {"rope_cache": (1, call.ROPE_DIM)}).items():
        cache = getattr(call, name)
        require_tensor(name, cache, call.query.dtype, num_blocks, block_size, *width)
        require(cache.stride(3) == 1, f"{name} is not contiguous in its last dimension")
        require(cache.stride(0) == block_size * cache.stride(1), f"the slots of {name} are not equally far apart")
    require(call.value_cache.stride() == call.key_cache.stride(), "the values do not have the strides of the keys")
    require(call.kv_head_stride == call.key_cache.stride(2), "not the stride of the cache's heads")
    require(call.rope_stride == call.rope_cache.stride(1), "not the stride of rope_cache's slots")
    require(grid[1] == num_kv_heads, f"the grid {grid} does not have a program for each KV head")
    require(call.query.shape[2] == call.HEAD_DIM + call.ROPE_DIM, "the queries do not have the keys' elements")
    require(max(16, call.ROPE_DIM) <= call.ROPE_PADDED, f"ROPE_PADDED {call.ROPE_PADDED} is too small")


def _attended(call: Any, metadata: AttentionMetadata) -> torch.Tensor:
    batch = AttentionMetadata(
        **{name: plain(getattr(metadata, name)) for name in ("slot_mapping", "cu_seqlens_q", "seq_lens")},
        block_tables=plain(metadata.block_tables),
        num_decodes=0,
        max_query_len=metadata.max_query_len,
        max_seq_len=metadata.max_seq_len,
    )
    tensors = [plain(item) for item in (call.query, call.key_cache, call.value_cache)]
    if call.value_scale is not None:
        tensors[1:] = [tensor.view(FP8) for tensor in tensors[1:]]
    sinks = None if call.sinks is None else plain(call.sinks)
    inputs = AttentionInputs(*tensors, batch, call.scale, _window(call), call.softcap, sinks)
    rope_cache = getattr(call, "rope_cache", None)
    if rope_cache is not None:
        inputs = replace(inputs, rope_cache=plain(rope_cache))
    return attention_reference.attention(replace(inputs, value_scale=call.value_scale or 1.0))


def _window(call: Any) -> Window | None:
    require(
        not (call.WINDOW and call.CHUNK), f"a layer has a window of {call.WINDOW} and chunks of {call.CHUNK} tokens"
    )
    return Chunk(call.CHUNK) if call.CHUNK else call.WINDOW or None


def prefill(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.attention.triton.prefill.prefill_kernel."""
    require_tensor("cu_seqlens_q", call.cu_seqlens_q, torch.int32, call.seq_lens.shape[0] + 1)
    metadata = _check_attention(call, grid, call.cu_seqlens_q, call.first_token)
    _check_output(call)
    require(call.num_seqs == metadata.num_seqs, f"num_seqs {call.num_seqs} is not {metadata.num_seqs}")
    require(max(16, call.VALUE_DIM) <= call.VALUE_PADDED, f"VALUE_PADDED {call.VALUE_PADDED} is too small")
    require(call.value_cache.shape[3] in (call.VALUE_DIM, call.VALUE_DIM // 2), "VALUE_DIM is not that of the values")
    queries = call.ROWS // call.GROUP_SIZE
    bounds = plain(call.cu_seqlens_q).tolist()
    tiles = [start // queries + i - (start - end) // queries for i, (start, end) in enumerate(pairwise(bounds))]
    needed = max(tiles) - call.first_token // queries
    require(needed <= grid[0], f"{grid[0]} tiles do not cover the queries, which need {needed}")
    own = slice(bounds[0], bounds[-1])
    return lambda: plain(call.output)[own].copy_(_attended(call, metadata)[own])


def plan_splits(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.attention.triton.decode.plan_splits_kernel."""
    require_tensor("first_item", call.first_item, torch.int32, call.num_seqs + 1)
    require_tensor("seq_lens", call.seq_lens, torch.int32, None)
    require(call.num_seqs <= call.seq_lens.shape[0], f"num_seqs {call.num_seqs} is more than there are")
    require(tuple(grid) == (1,), f"the grid {grid} is not one program")
    seq_lens = plain(call.seq_lens)[: call.num_seqs].tolist()
    counts = [_num_splits(seq_len, call) for seq_len in seq_lens]
    room = call.item_sequences.shape[0]
    require(sum(counts) <= room, f"{sum(counts)} splits do not fit into {room}")

    def compute() -> None:
        sequences = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        plain(call.item_sequences)[: len(sequences)] = sequences.int()
        plain(call.first_item).copy_(torch.tensor([0, *accumulate(counts)]))

    return compute


def _num_splits(seq_len: int, call: Any) -> int:
    num_keys = seq_len - first_key(_window(call), seq_len - 1) // call.TILE * call.TILE
    tiles = math.ceil(math.ceil(num_keys / call.MAX_SPLITS) / call.TILE)
    return max(1, math.ceil(num_keys / max(tiles * call.TILE, call.KEYS_PER_SPLIT)))


def split_decode(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.attention.triton.decode.split_decode_kernel: here the first split sees all keys and sinks."""
    num_heads, head_dim = call.query.shape[1], call.HEAD_DIM
    bounds = torch.arange(call.num_seqs + 1, dtype=torch.int32)
    metadata = _check_attention(call, grid, bounds, num_seqs=call.num_seqs)
    _check_output(call)
    require_tensor("first_item", call.first_item, torch.int32, call.num_seqs + 1)
    require_tensor("item_sequences", call.item_sequences, torch.int32, None)
    require_tensor("split_output", call.split_output, torch.float32, None, num_heads, head_dim)
    require_tensor("split_lse", call.split_lse, torch.float32, call.split_output.shape[0], num_heads)
    require(call.split_output.is_contiguous() and call.split_lse.is_contiguous(), "splits are not contiguous")

    def compute() -> None:
        attended = _attended(call, metadata)
        plain(call.split_output).zero_()
        plain(call.split_lse).fill_(-torch.inf)
        for sequence, (first, end) in enumerate(pairwise(plain(call.first_item).tolist())):
            if end - first == 1:
                plain(call.output)[sequence] = attended[sequence]
            else:
                require(end <= call.split_output.shape[0], f"the splits {first} to {end} have no room")
                plain(call.split_output)[first] = attended[sequence].float()
                plain(call.split_lse)[first] = 0.0

    return compute


def reduce_splits(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.attention.triton.decode.reduce_splits_kernel."""
    _check_output(call)
    num_items, num_heads, head_dim = call.split_output.shape
    num_seqs = call.first_item.shape[0] - 1
    require_tensor("split_output", call.split_output, torch.float32, None, call.output.shape[1], None)
    require_tensor("split_lse", call.split_lse, torch.float32, num_items, num_heads)
    require(head_dim == call.HEAD_DIM, "constants do not match the splits")
    require(call.MAX_SPLITS & (call.MAX_SPLITS - 1) == 0, f"MAX_SPLITS {call.MAX_SPLITS} is not a power of two")
    require(tuple(grid) == (num_seqs, num_heads), f"the grid {grid} is not one program for each head")

    def compute() -> None:
        for sequence, (first, end) in enumerate(pairwise(plain(call.first_item).tolist())):
            if end - first > 1:
                require(end - first <= call.MAX_SPLITS, f"{end - first} splits are more than {call.MAX_SPLITS}")
                weights = torch.softmax(plain(call.split_lse)[first:end] * math.log(2.0), dim=0)
                combined = (plain(call.split_output)[first:end] * weights.unsqueeze(-1)).sum(dim=0)
                plain(call.output)[sequence] = combined.to(call.output.dtype)

    return compute


def _check_output(call: Any) -> None:
    require(call.output.stride(2) == 1, "output is not contiguous in its last dimension")
    require((call.output_token_stride, call.output_head_stride) == call.output.stride()[:2], "not output's strides")
    if hasattr(call, "query"):
        value_dim = getattr(call, "VALUE_DIM", call.HEAD_DIM)
        require_tensor("output", call.output, call.query.dtype, *call.query.shape[:2], value_dim)


CONTRACTS: dict[str, Contract] = {
    "_store_kernel": store,
    "_take_pending_kernel": take_pending,
    "copy_pages_kernel": copy_pages,
    "prefill_kernel": prefill,
    "plan_splits_kernel": plan_splits,
    "split_decode_kernel": split_decode,
    "reduce_splits_kernel": reduce_splits,
}
