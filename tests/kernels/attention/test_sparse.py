"""The choice of tokens and the attention to them: against float64, with padding, ties, and in any chunks and batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kernels.attention import reference
from kernels.attention.base import AttentionInputs
from kernels.attention.cpu_backend import CpuBackend
from kernels.attention.indexer import IndexerInputs, topk_slots
from tests.kernels.attention.paged_batches import (
    BATCHES,
    PADDING,
    Batch,
    Shape,
    assert_matches,
    make_batch,
    with_padding_of_length_one,
)
from tests.pairs import each_pair

INDEX = Shape(num_heads=6, num_kv_heads=1, head_dim=24, block_size=4)
LATENT = Shape(num_heads=5, num_kv_heads=1, head_dim=40, block_size=4)
VALUE_DIM = 32


@pytest.fixture
def any_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def choose(batch: Batch, top_k: int) -> torch.Tensor:
    """Return the slots that an indexer with this batch's queries and keys chooses."""
    weights = torch.randn(len(batch.query), batch.query.shape[1], generator=torch.Generator().manual_seed(1))
    inputs = IndexerInputs(
        batch.query, weights, batch.key_cache[:, :, 0], batch.metadata, batch.query.shape[2] ** -0.5, top_k
    )
    return topk_slots(inputs)


def latent_inputs(batch: Batch, slots: torch.Tensor | None) -> AttentionInputs:
    return replace(batch.inputs(), value_cache=batch.key_cache[..., :VALUE_DIM], topk_slots=slots)


def choose_in_float64(batch: Batch, top_k: int) -> list[set[int]]:
    """Return the same as sets, without a thought for speed."""
    weights = torch.randn(len(batch.query), batch.query.shape[1], generator=torch.Generator().manual_seed(1)).double()
    chosen: list[set[int]] = []
    metadata, block_size = batch.metadata, batch.key_cache.shape[1]
    for index, (start, end) in enumerate(pairwise(metadata.cu_seqlens_q.tolist())):
        table, seq_len = metadata.block_tables[index].tolist(), int(metadata.seq_lens[index])
        for row in range(start, end):
            scores = {}
            for position in range(seq_len - (end - 1 - row) if table[0] >= 0 else 0):
                slot = table[position // block_size] * block_size + position % block_size
                key = batch.key_cache.flatten(0, 2)[slot].double()
                products = batch.query[row].double() @ key / math.sqrt(len(key))
                scores[slot] = float(weights[row] @ products.clamp(min=0.0))
            chosen.append(set(sorted(scores, key=lambda slot: -scores[slot])[:top_k]))
    return chosen


@pytest.mark.parametrize("top_k", [1, 7, 16, 1000])
@pytest.mark.parametrize("lengths", BATCHES)
def test_the_tokens_with_the_highest_scores_are_chosen(lengths: str, top_k: int) -> None:
    batch = make_batch(BATCHES[lengths], INDEX)
    chosen = choose(batch, top_k)
    assert chosen.dtype == torch.int32
    assert chosen.shape == (len(batch.query), min(top_k, batch.metadata.max_seq_len))
    assert [{slot for slot in row if slot >= 0} for row in chosen.tolist()] == choose_in_float64(batch, top_k)


def test_slots_are_in_the_order_of_positions() -> None:
    batch = make_batch([(3, 30)], INDEX)
    slots = [int(batch.metadata.block_tables[0, p // 4]) * 4 + p % 4 for p in range(30)]
    for row in choose(batch, 9).tolist():
        positions = [slots.index(slot) for slot in row]
        assert positions == sorted(positions)


@pytest.mark.parametrize("top_k", [1, 4, 11])
def test_of_equal_scores_the_first_tokens_are_chosen(top_k: int) -> None:
    """As where no head's product is positive."""
    batch = make_batch([(5, 40)], INDEX)
    batch = replace(batch, key_cache=-batch.key_cache.abs(), query=batch.query.abs())
    slots = [int(batch.metadata.block_tables[0, p // 4]) * 4 + p % 4 for p in range(40)]
    assert choose(batch, top_k).tolist() == [slots[:top_k]] * 5


@each_pair(lengths=BATCHES, top_k=[1, 7, 16, 1000], dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_attention_to_chosen_tokens_matches_the_reference(
    lengths: list[tuple[int, int]], top_k: int, dtype: torch.dtype
) -> None:
    batch = make_batch(lengths, replace(LATENT, dtype=dtype))
    inputs = latent_inputs(batch, choose(make_batch(lengths, INDEX), top_k))
    assert_matches(CpuBackend().forward(inputs), reference.attention(inputs))


def test_few_tokens_are_all_attended_to() -> None:
    lengths = [(1, 9), (8, 8), (3, 7)]
    batch = make_batch(lengths, LATENT)
    sparse = CpuBackend().forward(latent_inputs(batch, choose(make_batch(lengths, INDEX), 9)))
    assert_matches(sparse, reference.attention(latent_inputs(batch, None)))


def test_padding_attends_to_nothing() -> None:
    lengths = [(1, 20), PADDING, (4, 10), PADDING]
    for change in (lambda batch: batch, with_padding_of_length_one):
        slots = choose(change(make_batch(lengths, INDEX)), 5)
        assert (slots[[1, 6]] == -1).all()
        assert not CpuBackend().forward(latent_inputs(change(make_batch(lengths, LATENT)), slots))[[1, 6]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_the_same_in_any_chunks_and_batch_and_on_any_threads(any_threads: None, dtype: torch.dtype) -> None:
    """The queries of a prompt of several times top_k tokens, alone, in chunks, and beside other sequences."""
    lengths = [(60, 60), (1, 33), (9, 40)]
    index, latent = (make_batch(lengths, replace(shape, dtype=dtype)) for shape in (INDEX, LATENT))
    weights = torch.randn(len(index.query), INDEX.num_heads, generator=torch.Generator().manual_seed(2))

    def attended(indexed: Batch, attending: Batch, rows: slice) -> torch.Tensor:
        slots = topk_slots(
            IndexerInputs(indexed.query, weights[rows], indexed.key_cache[:, :, 0], indexed.metadata, 0.2, 8)
        )
        return CpuBackend().forward(latent_inputs(attending, slots))

    together = attended(index, latent, slice(None))
    torch.set_num_threads(3)
    first, others = (batch.one_sequence(0) for batch in (index, latent)), index.one_sequence(2).query
    alone = attended(*first, slice(0, 60))
    assert torch.equal(alone, together[:60])
    for count in (1, 2, 25, 52):  # the last chunk of the prompt, which may begin before top_k tokens
        last = (batch.one_sequence(0).last_queries(count) for batch in (index, latent))
        assert torch.equal(attended(*last, slice(60 - count, 60)), alone[-count:])
    beside = attended(index.one_sequence(2), latent.one_sequence(2), slice(61, 61 + len(others)))
    assert torch.equal(beside, together[61:])
