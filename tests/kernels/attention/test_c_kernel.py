"""The C attention kernel where its shapes are odd: tails of words, strips, tiles and spans, and several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.c_kernel import is_supported, paged_attention
from kernels.attention.window import Chunk, Window
from kernels.cpu.library import library, set_num_threads
from tests.kernels.attention.paged_batches import (
    PADDING,
    Batch,
    Shape,
    assert_matches,
    make_batch,
    with_latents,
    with_padding_of_length_one,
    without_blocks_before,
)
from tests.pairs import each_pair

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

DTYPES = [torch.float32, torch.bfloat16]
NUM_THREADS = [1, 2, 3]
MIXED = [(1, 130), (40, 90), PADDING, (3, 3), (1, 1), (70, 70), (2, 65)]
LONG = [(1, 4100), (4, 2000), (9, 1500), (130, 700)]  # several spans where there are several threads


@pytest.fixture
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    set_num_threads(request.param)
    yield request.param
    set_num_threads(1)


def run(batch: Batch, window: Window | None = None) -> torch.Tensor:
    return paged_attention(batch.inputs(window))


@each_pair(head_dim=[16, 32, 64, 80, 128, 256, 512], group_size=[1, 2, 3, 4, 5, 8, 9], dtype=DTYPES)
def test_head_dims_and_groups(head_dim: int, group_size: int, dtype: torch.dtype) -> None:
    batch = make_batch(MIXED, Shape(2 * group_size, 2, head_dim, dtype=dtype))
    assert_matches(run(batch), batch.expected())


@each_pair(
    window=[None, 1, 15, 64, 1000, Chunk(1), Chunk(24), Chunk(64), Chunk(1000)],
    block_size=[1, 7, 16, 256],
    dtype=DTYPES,
)
def test_block_sizes_and_windows(window: Window | None, block_size: int, dtype: torch.dtype) -> None:
    batch = make_batch(MIXED, Shape(4, 2, 48, block_size, dtype))
    assert_matches(run(batch, window), batch.expected(window))


@pytest.mark.parametrize("query_len", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_few_queries_over_a_context(query_len: int) -> None:
    batch = make_batch([(query_len, 200), (query_len, query_len)], Shape(2, 1, 64, dtype=torch.bfloat16))
    assert_matches(run(batch), batch.expected())


@each_pair(indirect=["num_threads"], num_threads=NUM_THREADS, window=[None, 300, Chunk(600)], dtype=DTYPES)
def test_spans_of_long_contexts_are_merged(num_threads: int, window: Window | None, dtype: torch.dtype) -> None:
    batch = make_batch(LONG, Shape(4, 2, 128, dtype=dtype))
    assert_matches(run(batch, window), batch.expected(window))


@each_pair(
    indirect=["num_threads"],
    num_threads=NUM_THREADS,
    query_len=[1, 3],
    window=[None, 40, 300, 2000, Chunk(250)],
    block_size=[1, 7, 16, 256],
    dtype=DTYPES,
)
def test_sequences_that_begin_with_the_same_blocks(
    num_threads: int, query_len: int, window: Window | None, block_size: int, dtype: torch.dtype
) -> None:
    lengths = [(query_len, seq_len) for seq_len in (700, 512, 901, 300, 257, 640)] + [(1, 520), (1, 512)]
    batch = make_batch(lengths, Shape(num_heads=4, num_kv_heads=2, head_dim=32, block_size=block_size, dtype=dtype))
    tables = batch.metadata.block_tables.clone()
    for sequence, num_keys in ((1, 512), (2, 600), (4, 257), (5, 600), (6, 512), (7, 512)):  # the fourth is alone
        tables[sequence, : num_keys // block_size] = tables[0, : num_keys // block_size]
    batch = replace(batch, metadata=replace(batch.metadata, block_tables=tables))
    assert_matches(run(batch, window), batch.expected(window))


@each_pair(
    indirect=["num_threads"],
    num_threads=NUM_THREADS,
    batch={
        "few": (Shape(4, 2, 32), 20),
        "more than an item's rows": (Shape(2, 1, 64), 150),
        "each head by itself": (Shape(16, 8, 128), 40),
        "odd groups": (Shape(6, 2, 16), 90),
    },
    dtype=DTYPES,
)
def test_many_sequences_that_begin_with_the_same_blocks(
    num_threads: int, batch: tuple[Shape, int], dtype: torch.dtype
) -> None:
    """The last few share less, and a prefill goes before them."""
    shape, num_seqs = batch
    prefill = [(30, 90)]
    whole = make_batch(prefill + [(1, 290 + 7 * (i % 9)) for i in range(num_seqs)], replace(shape, dtype=dtype))
    tables = whole.metadata.block_tables.clone()
    tables[2:, :12] = tables[1, :12]
    tables[2:-3, :18] = tables[1, :18]
    whole = replace(whole, metadata=replace(whole.metadata, block_tables=tables))
    assert_matches(run(whole), whole.expected())


def test_a_long_prompt_of_many_heads_beside_decodes() -> None:
    batch = make_batch([(600, 600), (1, 900), (1, 20)], Shape(8, 4, 64, dtype=torch.bfloat16))
    assert_matches(run(batch), batch.expected())


@pytest.mark.parametrize("magnitude", [1e-3, 8.0])
def test_scores_far_from_zero(magnitude: float) -> None:
    batch = make_batch([(1, 300), (33, 100)], Shape(4, 2, 64))
    batch = replace(batch, query=batch.query * magnitude)
    assert_matches(run(batch), batch.expected())


def test_padding_of_one_token_yields_zeros() -> None:
    batch = with_padding_of_length_one(make_batch([PADDING, (1, 20), PADDING, (40, 50)], Shape(dtype=torch.bfloat16)))
    output = run(batch)
    assert_matches(output, batch.expected())
    assert not output[[0, 2]].any()


@pytest.mark.parametrize("window", [1, 70, 150, Chunk(50), Chunk(100)])
def test_blocks_before_the_window_are_never_read(window: Window) -> None:
    whole = make_batch([(1, 400), (3, 500), (90, 300)], Shape(4, 2, 64, 7, torch.bfloat16))
    freed = without_blocks_before(whole, window)
    assert (freed.metadata.block_tables != whole.metadata.block_tables).any()
    assert_matches(run(freed, window), whole.expected(window))


def test_rows_after_the_last_sequence_do_not_matter() -> None:
    batch = make_batch([(1, 20), (4, 10)], Shape())
    rows = torch.cat([batch.query, torch.full_like(batch.query, torch.nan)])
    output = run(replace(batch, query=rows))
    assert_matches(output[: len(batch.query)], batch.expected())


@pytest.mark.parametrize("num_threads", [3], indirect=True)
@pytest.mark.usefixtures("num_threads")
def test_several_threads_may_call_at_once() -> None:
    batches = [make_batch(LONG, Shape(4, 2, 64, dtype=dtype), seed=seed) for seed in range(2) for dtype in DTYPES]
    expected = [run(batch) for batch in batches]
    together = threading.Barrier(len(batches))

    def repeat(index: int) -> list[torch.Tensor]:
        together.wait()
        return [run(batches[index]) for _ in range(5)]

    with ThreadPoolExecutor(len(batches)) as threads:
        outputs = list(threads.map(repeat, range(len(batches))))
    for index, repeated in enumerate(outputs):
        for output in repeated:  # how a context is divided does not depend on who computes it
            assert torch.equal(output, expected[index])


@each_pair(
    indirect=["num_threads"],
    num_threads=NUM_THREADS,
    shape=[(576, 512, 16), (576, 512, 20), (320, 256, 3), (48, 32, 1), (80, 64, 128)],
    dtype=DTYPES,
)
def test_latents(num_threads: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Values that are the beginnings of keys, of one KV head, with odd numbers of query heads."""
    head_dim, value_dim, num_heads = shape
    batch = make_batch([(1, 700), (3, 200), PADDING, (20, 90), (1, 1)], Shape(num_heads, 1, head_dim, dtype=dtype))
    batch = with_latents(batch, value_dim)
    assert_matches(run(batch), batch.expected())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_batches(data: st.DataObject) -> None:
    set_num_threads(data.draw(st.integers(1, 3)))
    sequence = st.integers(1, 300).flatmap(lambda seq_len: st.tuples(st.integers(1, seq_len), st.just(seq_len)))
    lengths = data.draw(st.lists(sequence | st.just(PADDING), min_size=1, max_size=5))
    num_kv_heads = data.draw(st.integers(1, 3))
    shape = Shape(
        num_heads=num_kv_heads * data.draw(st.integers(1, 9)),
        num_kv_heads=num_kv_heads,
        head_dim=16 * data.draw(st.integers(1, 9)),
        block_size=data.draw(st.sampled_from([1, 3, 16, 64])),
        dtype=data.draw(st.sampled_from(DTYPES)),
    )
    window = data.draw(st.none() | st.integers(1, 310) | st.builds(Chunk, st.integers(1, 310)))
    batch = make_batch(lengths, shape, seed=data.draw(st.integers(0, 1000)))
    assert_matches(run(batch, window), batch.expected(window))


def test_unsupported_types_and_head_dims() -> None:
    assert is_supported(torch.bfloat16, 128)
    assert not is_supported(torch.float16, 128)
    assert not is_supported(torch.float32, 72)
    assert is_supported(torch.float32, 512)
    assert is_supported(torch.float32, 576, 512)
    assert not is_supported(torch.float32, 576)
    assert not is_supported(torch.float32, 576, 520)
    assert not is_supported(torch.float32, 64, 80)
    assert not is_supported(torch.float32, 528)
