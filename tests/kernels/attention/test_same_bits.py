"""The C attention kernel gives a query the same bits alone, in chunks, in a batch, and on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.c_kernel import paged_attention
from kernels.attention.window import Chunk, Window
from kernels.attention_metadata import AttentionMetadata, leading_decodes
from kernels.cpu.library import library, set_num_threads
from tests.kernels.attention.paged_batches import Batch, Shape, make_batch, with_latents
from tests.pairs import each_pair

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

DTYPES = [torch.float32, torch.bfloat16]
# A chunk: the sequence, and where its queries begin and end in the sequence.
Part = tuple[int, int, int]


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    set_num_threads(1)


def attend(
    whole: Batch, chunks: list[Part], num_threads: int, window: Window | None = None, *options: str
) -> torch.Tensor:
    """Compute these chunks of whole prompts as one batch, and return their rows in order."""
    starts = whole.metadata.cu_seqlens_q.tolist()
    rows = [row for sequence, start, end in chunks for row in range(starts[sequence] + start, starts[sequence] + end)]
    sequences = [sequence for sequence, _, _ in chunks]
    lengths = torch.tensor([0, *(end - start for _, start, end in chunks)])
    metadata = AttentionMetadata(
        slot_mapping=whole.metadata.slot_mapping[rows],
        cu_seqlens_q=lengths.cumsum(0).int(),
        seq_lens=torch.tensor([end for _, _, end in chunks], dtype=torch.int32),
        block_tables=whole.metadata.block_tables[sequences],
        num_decodes=leading_decodes(lengths[1:].tolist()),
        max_query_len=int(lengths.max()),
        max_seq_len=max(end for _, _, end in chunks),
    )
    set_num_threads(num_threads)
    return paged_attention(replace(whole, query=whole.query[rows], metadata=metadata).inputs(window, *options))


def assert_same_bits(
    whole: Batch, chunks: list[Part], num_threads: int, window: Window | None = None, *options: str
) -> None:
    """Compare the rows of a batch with those of every query computed as a decode of its own."""
    actual = attend(whole, chunks, num_threads, window, *options)
    singles = [(sequence, at, at + 1) for sequence, start, end in chunks for at in range(start, end)]
    expected = torch.cat([attend(whole, [single], 1, window, *options) for single in singles])
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def begin_alike(whole: Batch, num_blocks: int) -> Batch:
    """Return the batch with all sequences beginning with the first one's full blocks, as far as they have as many."""
    tables = whole.metadata.block_tables.clone()
    full_blocks = whole.metadata.seq_lens // whole.key_cache.shape[1]
    for table, count in zip(tables[1:], full_blocks[1:].tolist(), strict=True):
        shared = min(num_blocks, int(full_blocks[0]), count)
        table[:shared] = tables[0, :shared]
    return replace(whole, metadata=replace(whole.metadata, block_tables=tables))


@each_pair(
    num_threads=[1, 2, 3],
    window=[None, 100, Chunk(90)],
    shape=[Shape(4, 2, 128), Shape(3, 1, 80, 7), Shape(16, 2, 48, 256)],
    dtype=DTYPES,
)
def test_a_prompt_in_chunks(num_threads: int, window: Window | None, shape: Shape, dtype: torch.dtype) -> None:
    whole = make_batch([(300, 300)], replace(shape, dtype=dtype))
    for bounds in ([0, 300], [0, 1, 64, 65, 200, 202, 300], [0, 130, 260, 290, 299, 300]):
        chunks = [(0, start, end) for start, end in pairwise(bounds)]
        assert_same_bits(whole, chunks, num_threads, window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 16])
def test_long_contexts_that_threads_divide(num_threads: int, dtype: torch.dtype) -> None:
    whole = make_batch([(4100, 4100), (2000, 2000), (700, 700)], Shape(4, 2, 64, dtype=dtype))
    assert_same_bits(whole, [(0, 4099, 4100)], num_threads)
    assert_same_bits(whole, [(0, 4060, 4100), (1, 1999, 2000), (2, 690, 700)], num_threads)


@each_pair(num_threads=[1, 3], shape=[Shape(4, 2, 32), Shape(16, 8, 128), Shape(6, 2, 16, 7)], dtype=DTYPES)
def test_sequences_that_begin_with_the_same_blocks(num_threads: int, shape: Shape, dtype: torch.dtype) -> None:
    lengths = [290 + 17 * (i % 5) for i in range(20)]
    whole = begin_alike(make_batch([(length, length) for length in lengths], replace(shape, dtype=dtype)), 18)
    assert_same_bits(whole, [(i, length - 1, length) for i, length in enumerate(lengths)], num_threads)


@each_pair(num_threads=[1, 3], shape=[(576, 512, 16), (48, 32, 5), (320, 256, 128)], dtype=DTYPES)
def test_latents(num_threads: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    head_dim, value_dim, num_heads = shape
    whole = make_batch([(150, 150), (71, 71)], Shape(num_heads, 1, head_dim, dtype=dtype))
    chunks = [(0, 140, 150), (1, 0, 3), (1, 66, 71)]
    assert_same_bits(with_latents(whole, value_dim), chunks, num_threads)


@each_pair(head_dim=[64, 80, 96, 256, 512], group_size=[1, 2, 5, 8, 9, 16], dtype=DTYPES)
def test_head_dims_and_groups(head_dim: int, group_size: int, dtype: torch.dtype) -> None:
    whole = make_batch([(150, 150), (40, 40)], Shape(2 * group_size, 2, head_dim, dtype=dtype))
    assert_same_bits(whole, [(0, 90, 91), (0, 100, 150), (1, 0, 40)], 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_whose_sums_are_denormal(dtype: torch.dtype) -> None:
    whole = make_batch([(150, 150)], Shape(4, 2, 64, dtype=dtype))
    values = (whole.value_cache.float() * 2.0**-125).to(dtype)
    assert_same_bits(replace(whole, value_cache=values), [(0, 70, 150)], 2)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_batch(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 260), min_size=1, max_size=6))
    num_kv_heads = data.draw(st.integers(1, 2))
    shape = Shape(
        num_heads=num_kv_heads * data.draw(st.integers(1, 9)),
        num_kv_heads=num_kv_heads,
        head_dim=16 * data.draw(st.integers(1, 5)),
        block_size=data.draw(st.sampled_from([1, 3, 16, 64])),
        dtype=data.draw(st.sampled_from(DTYPES)),
    )
    whole = make_batch([(length, length) for length in lengths], shape, seed=data.draw(st.integers(0, 1000)))
    whole = begin_alike(whole, data.draw(st.integers(0, 12)))
    chunks = []
    for sequence, length in enumerate(lengths):
        start = data.draw(st.integers(max(0, length - 40), length - 1))
        chunks.append((sequence, start, data.draw(st.integers(start + 1, length))))
    window = data.draw(st.none() | st.integers(1, 200) | st.builds(Chunk, st.integers(1, 200)))
    options = data.draw(st.sampled_from([(), ("softcap",)]))
    assert_same_bits(whole, chunks, data.draw(st.integers(1, 3)), window, *options)
