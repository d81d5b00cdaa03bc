"""How a batch is written in flash-attn's arguments: its contract, in plain torch, must give the reference's result."""

from __future__ import annotations

import sys

import pytest
import torch

from kernels.attention.flash_attn_backend import FlashAttnBackend
from tests.kernels.attention import fake_flash_attn
from tests.kernels.attention.paged_batches import (
    BATCHES,
    PADDING,
    WINDOWS,
    Shape,
    assert_matches,
    make_batch,
    with_padding_of_length_one,
    without_blocks_before,
)

SHAPE = Shape(num_heads=6, num_kv_heads=2, head_dim=16, block_size=256)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FlashAttnBackend:
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    return FlashAttnBackend()


@pytest.mark.parametrize("sliding_window", WINDOWS)
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
def test_matches_the_reference(
    backend: FlashAttnBackend, lengths: list[tuple[int, int]], sliding_window: int | None
) -> None:
    batch = make_batch(lengths, SHAPE)
    assert_matches(batch.run(backend, sliding_window), batch.expected(sliding_window))


@pytest.mark.parametrize("lengths", [BATCHES["decodes around a block's edge"], BATCHES["mixed"]])
def test_a_softcap_matches_the_reference(backend: FlashAttnBackend, lengths: list[tuple[int, int]]) -> None:
    batch = make_batch(lengths, SHAPE)
    assert_matches(batch.run(backend, 5, "softcap"), batch.expected(5, "softcap"))


@pytest.mark.parametrize("lengths", [[(1, 700), (1, 256), (1, 257)], [(30, 700), (1, 256), (257, 257)]])
@pytest.mark.parametrize("sliding_window", [None, 100, 256, 600])
def test_contexts_of_several_blocks(
    backend: FlashAttnBackend, lengths: list[tuple[int, int]], sliding_window: int | None
) -> None:
    batch = make_batch(lengths, SHAPE)
    assert_matches(batch.run(backend, sliding_window), batch.expected(sliding_window))


@pytest.mark.parametrize("lengths", [[(1, 20), PADDING, (1, 300)], [(1, 20), PADDING, (4, 10), PADDING]])
def test_padding_that_claims_one_token_follows_no_block_table(
    backend: FlashAttnBackend, lengths: list[tuple[int, int]]
) -> None:
    batch = with_padding_of_length_one(make_batch(lengths, SHAPE))
    assert_matches(batch.run(backend), batch.expected())


@pytest.mark.parametrize("lengths", [[(1, 700), (1, 290)], [(3, 700), (1, 600)]])
def test_blocks_before_the_window_may_be_missing(backend: FlashAttnBackend, lengths: list[tuple[int, int]]) -> None:
    whole = make_batch(lengths, SHAPE)
    freed = without_blocks_before(whole, 100)
    assert (freed.metadata.block_tables != whole.metadata.block_tables).any()
    assert_matches(freed.run(backend, 100), whole.expected(100))


def test_layers_of_one_step_share_what_is_derived_from_it(backend: FlashAttnBackend) -> None:
    batch = make_batch(BATCHES["mixed"], SHAPE)
    derived = {id(backend._step_arguments(batch.metadata, 256)) for _ in range(3)}
    assert len(derived) == 1
    assert torch.equal(backend._step_arguments(batch.metadata, 256).seq_lens, batch.metadata.seq_lens)
