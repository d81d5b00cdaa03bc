"""The walk of a tile of queries over keys and values in the paged cache, shared by the attention kernels.

Keys are walked in tiles of TILE positions. Each position's slot is looked up in the block table, so a tile may span
several pages, or a page several tiles. Tiles begin at multiples of TILE whatever the range, so that a query adds up its
keys in the same order in any batch. The softmax is FlashAttention-2's online one (Dao, 2023), in base 2. Query heads
that share a KV head are packed into the rows of one tile, so that a key is loaded once for all of them:

    row of a tile     0    1    2    3    4    5   ...       (GROUP_SIZE 2)
    query, head       0,0  0,1  1,0  1,1  2,0  2,1 ...

A latent is a key whose beginning is its value too. It is loaded once, with the rest of the key apart; the tiles of
query heads that share it are counted as KV heads, all of which begin where the slot does. Where latents are expanded
to keys and values, all heads share only the rest of the key, which is in a cache of its own.

A cache in FP8 is read as words of two neighbouring elements. Products and sums are then of the even elements and of the
odd ones.

Memory that a masked lane points at is never read: a block of -1, a slot after the context, a padded head dimension.
"""

# ruff: noqa: N803, N806 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cache.triton.fp8 import decode_fp8

__all__ = ["METADATA", "add_sink", "attend_to_range", "first_tile", "reload_rows"]

_LOG2_E = tl.constexpr(1.4426950408889634)

# What changes from step to step is not specialised on: a step must not wait for a compilation. A step's arrays may be
# slices of one buffer, so their alignment changes too; the other tensors and strides are the same in every step.
METADATA = ["cu_seqlens_q", "seq_lens", "block_tables"]


@triton.jit
def first_tile(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """Return the start of the tile with the first key that the query at `position` sees.

    WINDOW and CHUNK are the tokens of a sliding window and of a chunk; 0: there is none.
    """
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(position - WINDOW + 1, 0) // TILE * TILE
    if CHUNK > 0:
        first_key = tl.maximum(position, 0) // CHUNK * CHUNK // TILE * TILE
    return first_key


@triton.jit
def reload_rows(pointer, value, ROWS: tl.constexpr):
    """Return the row numbers of a tile, reloaded so that the compiler cannot reuse what it computed from them before.

    Otherwise it would keep offsets and masks of the rows in registers throughout the loop over keys, and spill others.
    `pointer` points to `value`, which is loaded again.
    """
    return tl.arange(0, ROWS) + (tl.load(pointer, volatile=True) - value)


@triton.jit
def _capped(scores, softcap):
    """Return softcap * tanh(scores / softcap)."""
    small = tl.exp2(tl.abs(scores) * (-2.0 * _LOG2_E / softcap))  # at most 1
    size = softcap * ((1.0 - small) / (1.0 + small))
    return tl.where(scores < 0.0, -size, size)


@triton.jit
def add_sink(row_sum, row_max, sink):
    """Add a sink's share to the sum of a softmax, whose unit is exp2(row_max); without keys it stays 0."""
    return row_sum + tl.where(row_sum > 0.0, tl.exp2(sink * _LOG2_E - row_max), 0.0)


@triton.jit
def _attend_to_tiles(
    state,  # (unnormalised sum [ROWS, VALUE_PADDED], row maxima [ROWS], row sums [ROWS]) of the keys before
    odd_output,  # with words, the sum of odd elements, while that in the state is of even ones; else nothing
    query,  # with words, of even elements
    odd_query,
    rope_query,
    query_position,
    first_key,
    end_key,
    key_head,
    value_head,
    rope_head,
    slot_stride,
    rope_stride,
    block_table,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    SEES_ALL: tl.constexpr,  # whether every query sees every key of the range, which is a multiple of TILE
):
    """Add the keys at positions [first_key, end_key) to the state, and return it.

    HEAD_DIM and VALUE_DIM, and both as padded, are of what is loaded: elements, or words.
    """
    output, row_max, row_sum = state
    dim = tl.arange(0, DIM_PADDED)
    for start in range(first_key, end_key, TILE):
        position = start + tl.arange(0, TILE)
        if SEES_ALL:
            block = tl.load(block_table + position // BLOCK_SIZE)
        else:
            block = tl.load(block_table + position // BLOCK_SIZE, mask=position < end_key, other=-1)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        offset = slot[:, None] * slot_stride + dim[None, :]
        mask = (block >= 0)[:, None] & (dim[None, :] < HEAD_DIM)
        keys = tl.load(key_head + offset, mask=mask, other=0)
        if odd_query is not None:
            keys, odd_keys = decode_fp8(keys, query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if odd_query is not None:
            scores = tl.dot(odd_query, tl.trans(odd_keys), scores, input_precision="ieee")
        if rope_query is not None:
            rope_dim = tl.arange(0, ROPE_PADDED)
            rope_mask = (block >= 0)[:, None] & (rope_dim[None, :] < ROPE_DIM)
            if rope_head is None:
                rope_offset = slot[:, None] * slot_stride + HEAD_DIM + rope_dim[None, :]
                rope_keys = tl.load(key_head + rope_offset, mask=rope_mask, other=0.0)
            else:
                rope_offset = slot[:, None] * rope_stride + rope_dim[None, :]
                rope_keys = tl.load(rope_head + rope_offset, mask=rope_mask, other=0.0)
            scores = tl.dot(rope_query, tl.trans(rope_keys), scores, input_precision="ieee")
        # The softmax is of scores * factor, which the exponents multiply by in one operation with the difference.
        factor = scale * _LOG2_E
        if softcap is not None:
            scores = _capped(scores * scale, softcap)
            factor = _LOG2_E
        if not SEES_ALL:
            distance = query_position[:, None] - position[None, :]
            # A stored query sees no key from end_key on, nor a block that its window has freed. To check the blocks
            # here would copy the table once more, in the scores' layout, whose pointers spill registers.
            visible = distance >= 0
            if WINDOW > 0:
                visible = visible & (distance < WINDOW)
            if CHUNK > 0:
                visible = visible & (distance <= (query_position % CHUNK)[:, None])
            scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * factor)
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key yet
        weights = tl.exp2(scores * factor - finite_max[:, None])
        rescale = tl.exp2(row_max - finite_max)
        values = keys
        if rope_query is None or rope_head is not None:
            value_dim = tl.arange(0, VALUE_PADDED)
            value_mask = (block >= 0)[:, None] & (value_dim[None, :] < VALUE_DIM)
            value_offset = slot[:, None] * slot_stride + value_dim[None, :]
            values = tl.load(value_head + value_offset, mask=value_mask, other=0)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        output = output * rescale[:, None]
        if odd_query is not None:
            values, odd_values = decode_fp8(values, query.dtype)
            odd_output = odd_output * rescale[:, None]
            odd_output += tl.dot(weights.to(query.dtype), odd_values, input_precision="ieee")
        output += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        row_max = new_max
    return (output, row_max, row_sum), odd_output


@triton.jit
def attend_to_range(
    query,  # [ROWS, DIM_PADDED]
    rope_query,  # [ROWS, ROPE_PADDED], what multiplies the rest of a key; or None
    query_position,  # [ROWS]
    first_key,
    seen_end,  # up to there every query sees every key; not used with a window or chunks
    end_key,
    key_head,  # pointers to this KV head of slot 0, of elements or of uint16 words
    value_head,
    rope_head,  # pointer to the rest of slot 0's key; None: of a latent, it follows its value
    slot_stride,
    rope_stride,  # from a slot's rest to the next one's
    block_table,  # pointer to this sequence's row
    scale,  # positive
    softcap,  # or None
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TWO_LOOPS: tl.constexpr,  # whether keys that every query sees have a loop of their own, without masks
):
    """Attend to the keys at positions [first_key, end_key); return the unnormalised sum, row maxima and row sums.

    first_key is a multiple of TILE.
    """
    PER_WORD: tl.constexpr = 2 if key_head.dtype.element_ty == tl.uint16 else 1
    LOADED: tl.constexpr = HEAD_DIM // PER_WORD
    LOADED_PADDED: tl.constexpr = DIM_PADDED // PER_WORD
    VALUE_LOADED: tl.constexpr = VALUE_DIM // PER_WORD
    VALUE_LOADED_PADDED: tl.constexpr = VALUE_PADDED // PER_WORD
    odd_query = None
    odd_output = tl.zeros([ROWS], dtype=tl.float32)  # Triton 3.6 returns no None among others
    if PER_WORD == 2:
        query, odd_query = tl.split(tl.reshape(query, (ROWS, LOADED_PADDED, 2)))
        odd_output = tl.zeros([ROWS, VALUE_LOADED_PADDED], dtype=tl.float32)
    state = (
        tl.zeros([ROWS, VALUE_LOADED_PADDED], dtype=tl.float32),
        tl.full([ROWS], float("-inf"), dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.float32),
    )
    if TWO_LOOPS:
        masked_from = tl.maximum(first_key, seen_end // TILE * TILE)
        state, odd_output = _attend_to_tiles(
            state,
            odd_output,
            query,
            odd_query,
            rope_query,
            query_position,
            first_key,
            masked_from,
            key_head,
            value_head,
            rope_head,
            slot_stride,
            rope_stride,
            block_table,
            scale,
            softcap,
            WINDOW,
            CHUNK,
            BLOCK_SIZE,
            LOADED,
            LOADED_PADDED,
            VALUE_LOADED,
            VALUE_LOADED_PADDED,
            ROPE_DIM,
            ROPE_PADDED,
            TILE,
            True,
        )
        first_key = masked_from
    state, odd_output = _attend_to_tiles(
        state,
        odd_output,
        query,
        odd_query,
        rope_query,
        query_position,
        first_key,
        end_key,
        key_head,
        value_head,
        rope_head,
        slot_stride,
        rope_stride,
        block_table,
        scale,
        softcap,
        WINDOW,
        CHUNK,
        BLOCK_SIZE,
        LOADED,
        LOADED_PADDED,
        VALUE_LOADED,
        VALUE_LOADED_PADDED,
        ROPE_DIM,
        ROPE_PADDED,
        TILE,
        False,
    )
    if PER_WORD == 2:
        output, row_max, row_sum = state
        state = (tl.reshape(tl.join(output, odd_output), (ROWS, VALUE_PADDED)), row_max, row_sum)
    return state
