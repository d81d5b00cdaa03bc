"""How memory is divided between blocks, the pages of windows and states."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.layer_cache import KeyValue, Latent, LayerCache, State
from engine.kv.pool_sizes import PageSizes, PoolSizes, pages_in_reach, smallest, snapshots_left
from kernels.attention.window import Chunk

FULL, WINDOW, STATE = KeyValue(2, 8, 8), KeyValue(2, 8, 8, window=32), State(((4, 4), (16,)))
LIMITS = {"max_num_seqs": 100, "max_step_tokens": 64}


def sizes_of(*layers: LayerCache) -> PageSizes:
    return PageSizes.of(layers, block_size=16, element_size=2)


@pytest.mark.parametrize(("window", "pages"), [(1, 1), (2, 2), (16, 2), (17, 2), (18, 3), (32, 3), (33, 3), (34, 4)])
def test_the_next_token_reaches_so_many_pages_at_most(window: int, pages: int) -> None:
    assert max(position // 16 - max(0, position - window + 1) // 16 + 1 for position in range(200)) == pages
    assert pages_in_reach(window, 16) == pages


@pytest.mark.parametrize(
    ("tokens", "pages"), [(1, 1), (2, 1), (16, 1), (17, 2), (18, 2), (24, 2), (31, 3), (32, 2), (40, 3), (48, 3)]
)
def test_the_next_token_reaches_the_pages_of_its_chunk_at_most(tokens: int, pages: int) -> None:
    assert max(position // 16 - position // tokens * tokens // 16 + 1 for position in range(2000)) == pages
    assert pages_in_reach(Chunk(tokens), 16) == pages


def test_each_kind_has_its_page_size() -> None:
    sizes = sizes_of(FULL, WINDOW, STATE, WINDOW)
    assert (sizes.block, sizes.windows, sizes.slot) == (16 * 64, ((32, 2 * 16 * 64),), 4 * 32)
    assert not sizes.are_blocks_alone
    assert sizes_of(FULL, FULL).are_blocks_alone
    assert sizes.num_bytes(PoolSizes(3, 0, (2,), 5)) == 3 * 1024 + 2 * 2048 + 5 * 128


@pytest.mark.parametrize("num_tokens", [16, 100, 1000])
def test_memory_is_divided_for_sequences_of_a_length(num_tokens: int) -> None:
    sizes = sizes_of(FULL, WINDOW, STATE)
    memory = 10 * sizes.bytes_of_sequence(num_tokens, 2) + 4 * sizes.windows[0][1]
    pools = sizes.divide(memory, num_tokens=num_tokens, max_model_len=1000, num_snapshots=2, **LIMITS)
    blocks = -(-num_tokens // 16)
    assert pools == PoolSizes(10 * blocks, 0, (10 * min(blocks, 3) + 4,), 30, 10)
    assert sizes.num_bytes(pools) == memory


def test_no_more_than_the_sequences_of_a_batch_is_taken() -> None:
    sizes = sizes_of(FULL, WINDOW)
    pools = sizes.divide(2**40, num_tokens=160, max_model_len=320, num_snapshots=2, **LIMITS)
    assert pools == PoolSizes(2000, 0, (304,), 0, 0)


@pytest.mark.parametrize(
    ("wanted", "num_snapshots", "interval"),
    [(None, 15, 64), (None, 50, 32), (None, 0, 0), (0, 15, 0), (1, 15, 16), (48, 15, 48), (50, 15, 64)],
)
def test_a_full_cache_has_a_snapshot_within_prompts_for_each_slot_of_one(
    wanted: int | None, num_snapshots: int, interval: int
) -> None:
    sizes = PageSizes(block=1024, windows=(), slot=1100, block_size=16)
    pools = PoolSizes(100, num_slots=200, num_snapshots=num_snapshots)
    assert sizes.snapshot_interval(pools, wanted) == interval


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_few_sequences_may_be_as_long_as_the_model_allows(max_num_seqs: int) -> None:
    sizes = sizes_of(FULL, WINDOW, STATE)
    limits = {**LIMITS, "max_num_seqs": max_num_seqs}
    pools = sizes.divide(2**30, num_tokens=160, max_model_len=50_000, num_snapshots=2, **limits)
    assert pools.num_blocks == max_num_seqs * 50_000 // 16
    assert pools.num_slots == 3 * max_num_seqs


def test_without_full_attention_blocks_take_no_memory_and_are_many() -> None:
    sizes = sizes_of(STATE)
    pools = sizes.divide(30 * sizes.slot, num_tokens=160, max_model_len=1600, num_snapshots=2, **LIMITS)
    assert pools == PoolSizes(10_000, 0, (), 30, 10)


def test_too_little_memory_for_one_sequence_gives_no_block() -> None:
    sizes = sizes_of(FULL, STATE)
    memory = sizes.bytes_of_sequence(160, 2) - 1
    assert sizes.divide(memory, num_tokens=160, max_model_len=320, num_snapshots=2, **LIMITS).num_blocks == 0


@settings(max_examples=200, deadline=None)
@given(
    layers=st.lists(
        st.sampled_from(
            [
                FULL,
                WINDOW,
                STATE,
                Latent(24, 8),
                KeyValue(1, 16, 4),
                *(KeyValue(1, 4, 4, window) for window in (7, 100)),
            ]
        ),
        min_size=1,
    ),
    memory=st.integers(0, 10**6),
    num_tokens=st.integers(1, 500),
    longest=st.integers(1, 2000),
    num_seqs=st.integers(1, 20),
    step=st.integers(1, 300),
    snapshots=st.integers(0, 3),
)
def test_a_sequence_of_any_length_that_the_blocks_hold_gets_its_pages(
    layers: list[LayerCache], memory: int, num_tokens: int, longest: int, num_seqs: int, step: int, snapshots: int
) -> None:
    sizes = sizes_of(*layers)
    pools = sizes.divide(
        memory,
        num_tokens=min(num_tokens, longest),
        max_model_len=longest,
        max_num_seqs=num_seqs,
        max_step_tokens=step,
        num_snapshots=snapshots,
    )
    if not pools.num_blocks:
        return
    assert sizes.num_bytes(pools) <= memory
    assert bool(pools.num_slots) == bool(sizes.slot)
    most = min(pools.num_blocks, -(-longest // 16))
    for (window, _), pages in zip(sizes.windows, pools.num_window_pages, strict=True):
        assert pages >= min(most, pages_in_reach(window, 16) + -(-step // 16))


@pytest.mark.parametrize(
    ("slots", "each", "left"), [(30, 2, 10), (30, 0, 0), (1, 2, 0), (2, 2, 0), (3, 2, 1), (8, 1, 2)]
)
def test_half_of_the_snapshots_slots_are_lent_to_sequences(slots: int, each: int, left: int) -> None:
    assert snapshots_left(slots, each) == left


def test_every_rank_has_the_pages_that_all_have() -> None:
    assert smallest([PoolSizes(3, 1, (5, 2), 4, 2), PoolSizes(2, 6, (6, 1), 5, 1)]) == PoolSizes(2, 1, (5, 1), 4, 1)
    assert smallest([PoolSizes(3)]) == PoolSizes(3)
