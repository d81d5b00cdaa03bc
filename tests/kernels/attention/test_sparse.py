"""The choice of tokens and the attention to them: against float64, with padding, ties, and in any chunks and batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kernels.attention import reference
from kernels.attention.base import AttentionInputs
from kernels.attention.cpu_backend import CpuBackend
from kernels.attention.indexer import topk_slots, topk_slots_torch
from kernels.attention.indexer_inputs import IndexerInputs
from kernels.cpu.library import library, set_num_threads
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
LATENT = Shape(num_heads=5, num_kv_heads=1, head_dim=48, block_size=4)
VALUE_DIM = 32


@pytest.fixture
def any_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    if library() is not None:
        set_num_threads(1)


def choose(batch: Batch, top_k: int, compute: Callable[[IndexerInputs], torch.Tensor] = topk_slots) -> torch.Tensor:
    """Return the slots that an indexer with this batch's queries and keys chooses."""
    weights = torch.randn(len(batch.query), batch.query.shape[1], generator=torch.Generator().manual_seed(1))
    keys, scale = batch.key_cache[:, :, 0], batch.query.shape[2] ** -0.5
    return compute(IndexerInputs(batch.query, weights.to(keys.device), keys, batch.metadata, scale, top_k))


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


@pytest.mark.parametrize("lengths", BATCHES)
def test_the_tokens_with_the_highest_scores_are_chosen(lengths: str) -> None:
    batch, top_k = make_batch(BATCHES[lengths], INDEX), 1 + 6 * (len(lengths) % 4)  # 1, 7, 13 or 19
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


@each_pair(
    lengths=BATCHES,
    top_k=[1, 7, 16, 1000],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    use_c_kernel=[True, False],
)
def test_attention_to_chosen_tokens_matches_the_reference(
    lengths: list[tuple[int, int]], top_k: int, dtype: torch.dtype, use_c_kernel: bool
) -> None:
    batch = make_batch(lengths, replace(LATENT, dtype=dtype))
    inputs = latent_inputs(batch, choose(make_batch(lengths, INDEX), top_k))
    assert_matches(CpuBackend(use_c_kernel=use_c_kernel).forward(inputs), reference.attention(inputs))


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


@pytest.mark.parametrize("use_c_kernel", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_the_same_in_any_chunks_and_batch_and_on_any_threads(
    any_threads: None, dtype: torch.dtype, use_c_kernel: bool
) -> None:
    """The queries of a prompt of several times top_k tokens, alone, in chunks, and beside other sequences."""
    lengths = [(60, 60), (1, 33), (9, 40)]
    index, latent = (make_batch(lengths, replace(shape, dtype=dtype)) for shape in (INDEX, LATENT))
    weights = torch.randn(len(index.query), INDEX.num_heads, generator=torch.Generator().manual_seed(2))

    def attended(indexed: Batch, attending: Batch, rows: slice) -> torch.Tensor:
        slots = topk_slots(
            IndexerInputs(indexed.query, weights[rows], indexed.key_cache[:, :, 0], indexed.metadata, 0.2, 8)
        )
        return CpuBackend(use_c_kernel=use_c_kernel).forward(latent_inputs(attending, slots))

    together = attended(index, latent, slice(None))
    torch.set_num_threads(3)
    if library() is not None:
        set_num_threads(3)
    first, others = (batch.one_sequence(0) for batch in (index, latent)), index.one_sequence(2).query
    alone = attended(*first, slice(0, 60))
    assert torch.equal(alone, together[:60])
    for count in (1, 2, 25, 52):  # the last chunk of the prompt, which may begin before top_k tokens
        last = (batch.one_sequence(0).last_queries(count) for batch in (index, latent))
        assert torch.equal(attended(*last, slice(60 - count, 60)), alone[-count:])
    beside = attended(index.one_sequence(2), latent.one_sequence(2), slice(61, 61 + len(others)))
    assert torch.equal(beside, together[61:])


# --- Triton ---------------------------------------------------------------------------------------------------------


def choose_in_triton(batch: Batch, top_k: int) -> torch.Tensor:
    from kernels.attention.triton.indexer import topk_slots_triton

    return choose(batch, top_k, topk_slots_triton)


@pytest.fixture(params=[None, 16], ids=["one program a query", "chunks of 16 keys"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """The keys of a program, if several choose for one query; counts of two are added at once, in a loop."""
    import triton.language as tl

    from kernels.attention.triton import indexer, split_choice

    if request.param is not None:
        monkeypatch.setattr(indexer, "_FEW_KEYS", 0)
        monkeypatch.setattr(indexer, "_FEW_TOKENS", 2**30)
        monkeypatch.setattr(split_choice, "_CHUNK", request.param)
        monkeypatch.setattr(split_choice, "_CHUNKS_AT_ONCE", tl.constexpr(2))
    return request.param


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("top_k", [7, 1, 16, 1000])
@pytest.mark.parametrize("lengths", ["padded mixed", "mixed", "chunks after a prefix", "padding alone"])
def test_triton_chooses_the_same_tokens(kernel_device: torch.device, lengths: str, top_k: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        batch = make_batch(BATCHES[lengths], replace(INDEX, dtype=dtype), device=kernel_device)
        expected = choose(batch, top_k, topk_slots_torch)
        assert torch.equal(choose_in_triton(batch, top_k), expected)
        others = with_padding_of_length_one(batch)
        assert torch.equal(choose_in_triton(others, top_k), choose(others, top_k, topk_slots_torch))


@pytest.mark.usefixtures("chunk")
def test_triton_chooses_in_slices_and_skips_rows_after_the_last_sequence(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.attention.triton import indexer

    batch = make_batch([(1, 30), (9, 40)], INDEX, device=kernel_device)
    expected = choose_in_triton(batch, 6)
    monkeypatch.setattr(indexer, "_SCORES_AT_ONCE", 3 * 40)
    assert torch.equal(choose_in_triton(batch, 6), expected)
    longer = replace(batch, query=torch.cat([batch.query, batch.query[:2]]))
    weights = torch.randn(12, INDEX.num_heads, generator=torch.Generator().manual_seed(1)).to(kernel_device)
    inputs = IndexerInputs(longer.query, weights, batch.key_cache[:, :, 0], batch.metadata, 0.2, 6)
    assert (indexer.topk_slots_triton(inputs)[10:] == -1).all()


@pytest.mark.usefixtures("chunk")
def test_triton_chooses_among_several_tiles_of_scores(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.attention.triton import indexer

    batch = make_batch([(1, 70), (3, 90)], INDEX, device=kernel_device)
    batch = replace(batch, key_cache=batch.key_cache.round())  # some scores are equal
    batch = replace(batch, query=batch.query.round().clamp(-1, 1))
    monkeypatch.setattr(indexer, "_CHOSEN_AT_ONCE", 16)
    for top_k in (20, 70):
        assert torch.equal(choose_in_triton(batch, top_k), choose(batch, top_k, topk_slots_torch))


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("top_k", [4, 1, 11])
def test_triton_chooses_the_first_of_equal_scores(kernel_device: torch.device, top_k: int) -> None:
    batch = make_batch([(5, 40)], INDEX, device=kernel_device)
    batch = replace(batch, key_cache=-batch.key_cache.abs(), query=batch.query.abs())
    assert torch.equal(choose_in_triton(batch, top_k), choose(batch, top_k, topk_slots_torch))


@pytest.mark.parametrize("top_k", [21, 1, 1000])
@pytest.mark.parametrize("lengths", ["padded mixed", "mixed", "padding alone"])
def test_triton_attends_as_the_reference(kernel_device: torch.device, lengths: str, top_k: int) -> None:
    from kernels.attention.triton.backend import TritonBackend

    for dtype in (torch.float32, torch.bfloat16):
        batch = make_batch(BATCHES[lengths], replace(LATENT, dtype=dtype), device=kernel_device)
        slots = choose(make_batch(BATCHES[lengths], INDEX, device=kernel_device), top_k)
        inputs = latent_inputs(batch, slots)
        assert_matches(TritonBackend().forward(inputs), reference.attention(inputs))


def test_triton_gives_the_same_bits_in_any_chunks_and_batch(kernel_device: torch.device) -> None:
    from kernels.attention.triton.indexer import topk_slots_triton
    from kernels.attention.triton.sparse import sparse_attention_triton

    lengths = [(30, 30), (1, 33)]
    index, latent = (make_batch(lengths, shape, device=kernel_device) for shape in (INDEX, LATENT))
    weights = torch.randn(len(index.query), INDEX.num_heads, generator=torch.Generator().manual_seed(2))

    def attended(indexed: Batch, attending: Batch, rows: slice) -> torch.Tensor:
        own = weights[rows].to(kernel_device)
        keys = indexed.key_cache[:, :, 0]
        slots = topk_slots_triton(IndexerInputs(indexed.query, own, keys, indexed.metadata, 0.2, 8))
        return sparse_attention_triton(latent_inputs(attending, slots))

    together = attended(index, latent, slice(None))
    for count in (1, 7):
        last = (batch.one_sequence(0).last_queries(count) for batch in (index, latent))
        assert torch.equal(attended(*last, slice(30 - count, 30)), together[30 - count : 30])
