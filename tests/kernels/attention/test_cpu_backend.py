"""The CPU backend against the reference: with the C kernel, and with torch's operators alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.cpu_backend import CpuBackend
from kernels.attention.sdpa_plan import make_plan
from kernels.attention.window import Chunk, Window
from tests.kernels.attention.paged_batches import (
    BATCHES,
    OPTIONS,
    PADDING,
    SHAPES,
    TOLERANCES,
    WINDOWS,
    Batch,
    Shape,
    assert_matches,
    make_batch,
    with_padding_of_length_one,
    without_blocks_before,
)
from tests.pairs import each_pair

BACKENDS = {"c kernel": True, "torch": False}


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS.keys())
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    return CpuBackend(use_c_kernel=request.param)


@each_pair(indirect=["backend"], backend=BACKENDS, lengths=BATCHES, shape=SHAPES, window=WINDOWS)
def test_matches_the_reference(
    backend: CpuBackend, lengths: list[tuple[int, int]], shape: Shape, window: Window | None
) -> None:
    batch = make_batch(lengths, shape)
    assert_matches(batch.run(backend, window), batch.expected(window))


@each_pair(
    indirect=["backend"],
    backend=BACKENDS,
    lengths=BATCHES,
    window=WINDOWS,
    options={" and ".join(options): options for options in OPTIONS},
)
def test_softcaps_and_sinks_match_the_reference(
    backend: CpuBackend, lengths: list[tuple[int, int]], window: Window | None, options: tuple[str, ...]
) -> None:
    batch = make_batch(lengths, Shape(num_heads=6, num_kv_heads=2, head_dim=16))
    assert_matches(batch.run(backend, window, *options), batch.expected(window, *options))


@pytest.mark.parametrize("options", [(), ("sinks",)])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("value_dim", [16, 80])
def test_values_have_another_size_than_keys(
    backend: CpuBackend, lengths: list[tuple[int, int]], value_dim: int, options: tuple[str, ...]
) -> None:
    batch = make_batch(lengths, Shape(num_heads=6, num_kv_heads=2, head_dim=48))
    values = batch.value_cache.repeat(1, 1, 1, 2)[..., :value_dim].contiguous()
    batch = replace(batch, value_cache=values)
    assert_matches(batch.run(backend, None, *options), batch.expected(None, *options))


@pytest.mark.parametrize("options", OPTIONS, ids=" and ".join)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_softcaps_and_sinks_of_long_chunks_in_every_dtype(dtype: torch.dtype, options: tuple[str, ...]) -> None:
    batch = make_batch([(300, 600), (290, 290), (1, 259)], Shape(num_heads=2, num_kv_heads=1, head_dim=16, dtype=dtype))
    for window in (None, 150):
        assert_matches(batch.run(CpuBackend(), window, *options), batch.expected(window, *options))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_every_dtype_and_block_size(backend: CpuBackend, dtype: torch.dtype, block_size: int) -> None:
    batch = make_batch(BATCHES["mixed"], Shape(block_size=block_size, dtype=dtype))
    assert_matches(batch.run(backend), batch.expected())


@pytest.mark.parametrize("window", [None, 1, 100, 257, 599, 600, 601, Chunk(64), Chunk(300), Chunk(599), Chunk(600)])
def test_a_chunk_of_several_tiles_after_a_long_prefix(backend: CpuBackend, window: Window | None) -> None:
    batch = make_batch([(300, 600), (513, 513), (1, 259)], Shape(num_heads=2, num_kv_heads=1, head_dim=16))
    assert_matches(batch.run(backend, window), batch.expected(window))


@pytest.mark.parametrize("window", [None, 50, 2000, Chunk(130)])
def test_one_long_decode_among_short_ones(backend: CpuBackend, window: Window | None) -> None:
    lengths = [(1, seq_len) for seq_len in (30, 2500, 1, 140, 150, 2499, 400)]
    batch = make_batch(lengths, Shape(num_heads=2, num_kv_heads=1, head_dim=16))
    assert_matches(batch.run(backend, window), batch.expected(window))


def test_short_decodes_are_not_padded_to_a_long_one() -> None:
    batch = make_batch([(1, 1000), (1, 30), (1, 31), (1, 32)], Shape(num_heads=1, num_kv_heads=1, head_dim=8))
    plan = make_plan(batch.metadata, 16, None)
    assert sorted(group.slots.shape[0] for group in plan.decode_groups) == [3 * 32, 1000]


@pytest.mark.parametrize(("shorter", "groups"), [(500, [2 * 1000]), (499, [499, 1000])])
def test_a_decode_of_half_the_longest_length_is_padded_to_it(shorter: int, groups: list[int]) -> None:
    batch = make_batch([(1, 1000), (1, shorter)], Shape(num_heads=1, num_kv_heads=1, head_dim=8))
    plan = make_plan(batch.metadata, 16, None)
    assert sorted(group.slots.shape[0] for group in plan.decode_groups) == groups


def test_a_whole_prompt_within_the_window_is_a_plain_causal_triangle() -> None:
    """Torch's operator skips what such a mask hides; other chunks are cut into tiles."""
    batch = make_batch([(600, 600), (600, 601)], Shape(num_heads=1, num_kv_heads=1, head_dim=8))
    for window, is_causal in ((None, True), (600, True), (599, False)):
        whole, chunk = make_plan(batch.metadata, 16, window).prefills
        assert (whole.is_causal, len(whole.tiles)) == (is_causal, 1 if is_causal else 3)
        assert (chunk.is_causal, len(chunk.tiles)) == (False, 3)


def test_tiles_do_not_cross_the_borders_of_chunks() -> None:
    batch = make_batch([(600, 600), (600, 601)], Shape(num_heads=1, num_kv_heads=1, head_dim=8))
    whole, chunk = make_plan(batch.metadata, 16, Chunk(600)).prefills
    assert (whole.is_causal, len(whole.tiles)) == (True, 1)
    assert [tile.query_rows.stop - 600 for tile in chunk.tiles] == [256, 512, 599, 600]
    assert [tile.keys for tile in chunk.tiles] == [slice(0, 257), slice(0, 513), slice(0, 600), slice(600, 601)]


@pytest.mark.parametrize("use_c_kernel", [True, False])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_mixed_batches(use_c_kernel: bool, data: st.DataObject) -> None:
    sequence = st.integers(1, 70).flatmap(lambda seq_len: st.tuples(st.integers(1, seq_len), st.just(seq_len)))
    lengths = data.draw(st.lists(sequence | st.just(PADDING), min_size=1, max_size=6))
    num_kv_heads = data.draw(st.integers(1, 3))
    shape = Shape(
        num_heads=num_kv_heads * data.draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        head_dim=data.draw(st.sampled_from([8, 12, 16, 32])),
        block_size=data.draw(st.sampled_from([1, 4, 16, 256])),
    )
    window = data.draw(st.none() | st.integers(1, 80) | st.builds(Chunk, st.integers(1, 80)))
    batch = make_batch(lengths, shape, seed=data.draw(st.integers(0, 1000)))
    assert_matches(batch.run(CpuBackend(use_c_kernel=use_c_kernel), window), batch.expected(window))


def test_padding_of_one_token_yields_zeros(backend: CpuBackend) -> None:
    batch = with_padding_of_length_one(make_batch([(1, 20), PADDING, (4, 10), PADDING], Shape()))
    output = batch.run(backend)
    assert_matches(output, batch.expected())
    assert not output[[1, 6]].any()


@pytest.mark.parametrize("window", [1, 7, 16, Chunk(8), Chunk(30)])
def test_blocks_before_the_window_may_be_missing(backend: CpuBackend, window: Window) -> None:
    whole = make_batch([(1, 40), (3, 50), (9, 9)], Shape(block_size=4))
    freed = without_blocks_before(whole, window)
    assert (freed.metadata.block_tables != whole.metadata.block_tables).any()
    assert_matches(freed.run(backend, window), whole.expected(window))


def test_one_step_s_layers_may_differ_in_window_and_heads(backend: CpuBackend) -> None:
    batch = make_batch(BATCHES["mixed"], Shape())
    other = make_batch(BATCHES["mixed"], Shape(num_heads=8, num_kv_heads=4, head_dim=16))
    other = Batch(other.query, other.key_cache, other.value_cache, batch.metadata)
    for window in (None, 5, None, 2, 5, Chunk(5)):
        assert_matches(batch.run(backend, window), batch.expected(window))
        assert_matches(other.run(backend, window), other.expected(window))


def test_a_plan_is_made_once_and_freed_with_its_step(backend: CpuBackend) -> None:
    batch = make_batch(BATCHES["mixed"], Shape())
    assert backend._sdpa._plan(batch.metadata, 16, None) is backend._sdpa._plan(batch.metadata, 16, None)
    assert len(backend._sdpa._plans) == 1
    del batch
    assert len(backend._sdpa._plans) == 0


def test_inference_mode_and_grad_mode_share_a_backend(backend: CpuBackend) -> None:
    batch = make_batch(BATCHES["chunks after a prefix"], Shape())
    with torch.inference_mode():
        batch.run(backend)
    assert_matches(batch.run(backend), batch.expected())


def test_queries_may_be_a_slice_of_a_fused_projection(backend: CpuBackend) -> None:
    batch = make_batch(BATCHES["mixed"], Shape())
    fused = torch.cat([batch.query, torch.full_like(batch.query, torch.nan)], dim=1)
    sliced = Batch(fused[:, : batch.query.shape[1]], batch.key_cache, batch.value_cache, batch.metadata)
    assert_matches(sliced.run(backend), batch.expected())
