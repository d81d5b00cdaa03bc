"""topk_slots of indexer.py on a GPU, in two Triton kernels: one scores the keys, one chooses the highest scores.

For few queries of long contexts the kernels of split_choice.py choose.

Launches follow from shapes and max_seq_len alone, so a step can be captured in a CUDA graph; the work follows from the
contexts. Sums have the same order in any batch, and equal scores are told apart by position, so that what a query
chooses does not depend on the others.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.indexer_inputs import IndexerInputs
from kernels.attention.step_cache import StepCache
from kernels.attention.triton.split_choice import MIN_KEY, choose_in_chunks, keys_of
from kernels.attention_metadata import AttentionMetadata

__all__ = ["choose_kernel", "index_scores_kernel", "topk_slots_triton"]

_TILE = {2: 64, 4: 16}  # keys of a program that scores, by bytes of an element: more would spill registers
_WARPS = {2: 4, 4: 8}
_SCORES_AT_ONCE = 2**26  # bounds the memory of scores
_PROGRAMS = 2048  # that score, if there are as many tiles: enough to fill a GPU
_CHOSEN_AT_ONCE = 2048  # scores that a program reads at once
_FEW_TOKENS = 64  # whose programs do not fill a GPU, so that several choose for one query if there is more than
_FEW_KEYS = 4096
_DIGITS = tl.constexpr(256)  # of scores as numbers of four digits
_PLACES: StepCache[int, tuple[torch.Tensor, torch.Tensor]] = StepCache()  # of the tokens of a step, for all its layers

# What changes from step to step is not specialised on: a step must not wait for a compilation.
_METADATA = ["positions", "sequences", "block_tables"]


@triton.jit(do_not_specialize=["num_keys", "table_stride"], do_not_specialize_on_alignment=_METADATA)
def index_scores_kernel(
    scores,  # float32 [num_tokens, num_keys]
    query,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    weights,  # float32 [num_tokens, NUM_HEADS]
    key_cache,  # [num_blocks, BLOCK_SIZE, HEAD_DIM], contiguous
    positions,  # int64 [num_tokens]; -1: padding
    sequences,  # int64 [num_tokens]
    block_tables,
    scale,
    num_keys,
    query_token_stride,
    query_head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program scores tiles of the keys that a query sees; a key without a block gets -inf."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int32)
    table = block_tables + tl.load(sequences + token) * table_stride
    dim, head = tl.arange(0, DIM_PADDED), tl.arange(0, HEADS_PADDED)
    is_dim, is_head = dim < HEAD_DIM, head < NUM_HEADS
    query_offset = token * query_token_stride + (head * query_head_stride)[:, None] + dim[None, :]
    queries = tl.load(query + query_offset, mask=is_head[:, None] & is_dim[None, :], other=0.0)
    weight = tl.load(weights + token * NUM_HEADS + head, mask=is_head, other=0.0)
    for start in range(tl.program_id(1) * TILE, position + 1, tl.num_programs(1) * TILE):
        key_position = start + tl.arange(0, TILE)
        is_seen = key_position <= position
        block = tl.load(table + key_position // BLOCK_SIZE, mask=is_seen, other=-1)
        slot = block.to(tl.int64) * BLOCK_SIZE + key_position % BLOCK_SIZE
        mask = (block >= 0)[:, None] & is_dim[None, :]
        keys = tl.load(key_cache + slot[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale  # [HEADS_PADDED, TILE]
        total = tl.sum(tl.maximum(products, 0.0) * weight[:, None], axis=0)
        total = tl.where(block >= 0, total, float("-inf"))
        tl.store(scores + token * num_keys + key_position, total, mask=is_seen)


@triton.jit
def _smallest_chosen(scores, end, top_k, TILE: tl.constexpr):
    """Return the `top_k`th highest score as an integer, and how many of its equals are chosen: a radix selection."""
    digit_value = tl.arange(0, 2 * _DIGITS)  # the upper half counts what is not looked at
    prefix, room = tl.cast(0, tl.int64), top_k
    for step in range(4):
        shift = 24 - 8 * step
        counts = tl.zeros([2 * _DIGITS], dtype=tl.int32)
        for start in range(0, end, TILE):
            key, may_be_chosen = keys_of(scores, start + tl.arange(0, TILE), end)
            number = key.to(tl.int64) - MIN_KEY  # from 0
            is_open = may_be_chosen & ((number >> (shift + 8)) == prefix)
            digit = tl.where(is_open, (number >> shift) & 255, _DIGITS).to(tl.int32)
            counts += tl.histogram(digit, 2 * _DIGITS)
        counts = tl.where(digit_value < _DIGITS, counts, 0)
        at_least = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts  # with this digit or a higher one
        chosen = tl.sum(((at_least >= room) & (digit_value < _DIGITS)).to(tl.int32), axis=0) - 1
        is_chosen = digit_value == chosen
        room = room - tl.sum(tl.where(is_chosen, at_least - counts, 0), axis=0)
        prefix = prefix * 256 + chosen
    return (prefix + MIN_KEY).to(tl.int32), room


@triton.jit(
    do_not_specialize=["num_keys", "top_k", "table_stride"], do_not_specialize_on_alignment=["slots", *_METADATA]
)
def choose_kernel(
    slots,  # int32 [num_tokens, top_k]
    scores,
    positions,
    sequences,
    block_tables,
    num_keys,
    top_k,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program lists the slots that a query chooses, by position, and -1 after them."""
    token = tl.program_id(0).to(tl.int64)
    own_scores, own_slots = scores + token * num_keys, slots + token * top_k
    end = tl.load(positions + token).to(tl.int32) + 1
    table = block_tables + tl.load(sequences + token) * table_stride
    smallest, room = tl.cast(MIN_KEY, tl.int32), tl.cast(0, tl.int32)
    if end > top_k:
        smallest, room = _smallest_chosen(own_scores, end, top_k, TILE)
    num_chosen = 0
    for start in range(0, end, TILE):
        position = start + tl.arange(0, TILE)
        key, may_be_chosen = keys_of(own_scores, position, end)
        is_tied = may_be_chosen & (key == smallest)
        rank = tl.cumsum(is_tied.to(tl.int32), axis=0)
        is_chosen = (may_be_chosen & (key > smallest)) | (is_tied & (rank <= room))
        room = room - tl.minimum(tl.sum(is_tied.to(tl.int32), axis=0), room)
        to = num_chosen + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
        block = tl.load(table + position // BLOCK_SIZE, mask=is_chosen, other=0)
        tl.store(own_slots + to, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=is_chosen)
        num_chosen += tl.sum(is_chosen.to(tl.int32), axis=0)
    for start in range(num_chosen, top_k, TILE):
        at = start + tl.arange(0, TILE)
        tl.store(own_slots + at, tl.full([TILE], -1, dtype=tl.int32), mask=at < top_k)


def topk_slots_triton(inputs: IndexerInputs) -> torch.Tensor:
    """Compute `kernels.attention.indexer.topk_slots`."""
    metadata, block_size = inputs.metadata, inputs.key_cache.shape[1]
    num_tokens, num_keys = inputs.query.shape[0], metadata.max_seq_len
    slots = torch.empty(num_tokens, min(inputs.top_k, num_keys), dtype=torch.int32, device=inputs.query.device)
    if slots.numel() == 0:
        return slots
    positions, sequences = _PLACES.get(metadata, num_tokens, lambda: _places(metadata, num_tokens))
    at_once = max(1, _SCORES_AT_ONCE // num_keys)
    for start in range(0, num_tokens, at_once):
        rows = slice(start, start + at_once)
        scores = _scores(inputs, rows, positions[rows], sequences[rows])
        if num_tokens <= _FEW_TOKENS and num_keys > _FEW_KEYS:
            own = slots[rows], scores, positions[rows], sequences[rows]
            choose_in_chunks(*own, metadata.block_tables, block_size)
            continue
        choose_kernel[(len(scores),)](
            slots[rows],
            scores,
            positions[rows],
            sequences[rows],
            metadata.block_tables,
            num_keys,
            slots.shape[1],
            metadata.block_tables.stride(0),
            BLOCK_SIZE=block_size,
            TILE=_CHOSEN_AT_ONCE,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return slots


def _places(metadata: AttentionMetadata, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's position and the index of its sequence, int64 [num_tokens] both; -1 and any for padding."""
    ends = metadata.cu_seqlens_q[1:]
    tokens = torch.arange(num_tokens, dtype=ends.dtype, device=ends.device)
    sequences = torch.searchsorted(ends, tokens, right=True).clamp(max=metadata.num_seqs - 1)
    positions = metadata.seq_lens[sequences] - (ends[sequences] - tokens)
    return torch.where(tokens < ends[-1], positions.clamp(min=-1), -1).long(), sequences


def _scores(inputs: IndexerInputs, rows: slice, positions: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """Return the scores of some tokens' queries, float32 [num_rows, max_seq_len]; those after a query are not set."""
    query, weights, metadata = inputs.query[rows], inputs.weights[rows].contiguous(), inputs.metadata
    assert query.stride(2) == 1
    assert inputs.key_cache.is_contiguous()
    num_rows, num_heads, head_dim = query.shape
    scores = query.new_empty(num_rows, metadata.max_seq_len, dtype=torch.float32)
    tile = _TILE[query.element_size()]
    num_tiles = triton.cdiv(metadata.max_seq_len, tile)
    index_scores_kernel[(num_rows, min(num_tiles, triton.cdiv(_PROGRAMS, num_rows)))](
        scores,
        query,
        weights,
        inputs.key_cache,
        positions,
        sequences,
        metadata.block_tables,
        inputs.scale,
        metadata.max_seq_len,
        *query.stride()[:2],
        metadata.block_tables.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEADS_PADDED=max(16, triton.next_power_of_2(num_heads)),
        DIM_PADDED=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=inputs.key_cache.shape[1],
        TILE=tile,
        num_warps=_WARPS[query.element_size()],
        enable_fp_fusion=True,
    )
    return scores
