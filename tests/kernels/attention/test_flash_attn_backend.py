"""How a batch is written in flash-attn's arguments: its contract, in plain torch, must give the reference's result."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.attention.flash import base
from kernels.attention.flash.base import FlashBackend, Part
from kernels.attention.flash.flash_attn import FlashAttnBackend
from kernels.attention.flash.flash_attn_3 import FlashAttn3Backend
from kernels.attention.window import Chunk
from kernels.attention_metadata import AttentionMetadata
from tests.kernels.attention import fake_flash_attn, fake_flash_attn_3
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


@pytest.fixture(params=[FlashAttnBackend, FlashAttn3Backend])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FlashBackend:
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash_attn_3)
    backend: FlashBackend = request.param()
    return backend


@pytest.mark.parametrize("window", [window for window in WINDOWS if not isinstance(window, Chunk)])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
def test_matches_the_reference(backend: FlashBackend, lengths: list[tuple[int, int]], window: int | None) -> None:
    batch = make_batch(lengths, SHAPE)
    assert_matches(batch.run(backend, window), batch.expected(window))


@pytest.mark.parametrize("lengths", [BATCHES["decodes around a block's edge"], BATCHES["mixed"]])
def test_a_softcap_matches_the_reference(backend: FlashBackend, lengths: list[tuple[int, int]]) -> None:
    batch = make_batch(lengths, SHAPE)
    assert_matches(batch.run(backend, 5, "softcap"), batch.expected(5, "softcap"))


@pytest.mark.parametrize("lengths", [[(1, 700), (1, 256), (1, 257)], [(30, 700), (1, 256), (257, 257)]])
@pytest.mark.parametrize("window", [None, 100, 256, 600])
def test_contexts_of_several_blocks(backend: FlashBackend, lengths: list[tuple[int, int]], window: int | None) -> None:
    batch = make_batch(lengths, SHAPE)
    assert_matches(batch.run(backend, window), batch.expected(window))


@pytest.mark.parametrize("lengths", [[(1, 20), PADDING, (1, 300)], [(1, 20), PADDING, (4, 10), PADDING]])
def test_padding_that_claims_one_token_follows_no_block_table(
    backend: FlashBackend, lengths: list[tuple[int, int]]
) -> None:
    batch = with_padding_of_length_one(make_batch(lengths, SHAPE))
    assert_matches(batch.run(backend), batch.expected())


@pytest.mark.parametrize("lengths", [[(1, 700), (1, 290)], [(3, 700), (1, 600)]])
def test_blocks_before_the_window_may_be_missing(backend: FlashBackend, lengths: list[tuple[int, int]]) -> None:
    whole = make_batch(lengths, SHAPE)
    freed = without_blocks_before(whole, 100)
    assert (freed.metadata.block_tables != whole.metadata.block_tables).any()
    assert_matches(freed.run(backend, 100), whole.expected(100))


def test_layers_of_one_step_share_what_is_derived_from_it(
    backend: FlashBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(BATCHES["mixed"], SHAPE)
    derive, derived = base._parts, []

    def counted(metadata: AttentionMetadata, query: torch.Tensor, block_size: int) -> list[Part]:
        derived.append(metadata)
        return derive(metadata, query, block_size)

    monkeypatch.setattr(base, "_parts", counted)
    for _ in range(3):
        assert_matches(batch.run(backend), batch.expected())
    assert derived == [batch.metadata]


def test_flash_attn_3_reads_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash_attn_3)
    for block_size in (1, 16, 24):
        batch = make_batch(BATCHES["decodes, then chunks"], replace(SHAPE, block_size=block_size))
        assert_matches(batch.run(FlashAttn3Backend(), 5), batch.expected(5))


def test_a_prefill_does_not_change_how_decodes_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for the decodes, whose contexts flash-attn splits, and one for the chunks of prompts."""
    calls: list[tuple[str, int]] = []
    for module, queries in ((fake_flash_attn, "num_seqs"), (fake_flash_attn_3, "num_tokens")):
        run = module.flash_attn_with_kvcache

        def record(q: torch.Tensor, *args: object, run: Any = run, queries: str = queries, **options: Any) -> Any:
            calls.append((queries, q.shape[0]))
            return run(q, *args, **options)

        monkeypatch.setattr(module, "flash_attn_with_kvcache", record)
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash_attn_3)
    batch = make_batch([(1, 40), (1, 700), (9, 9), (70, 130)], SHAPE)
    for backend in (FlashAttnBackend(), FlashAttn3Backend()):
        assert_matches(batch.run(backend), batch.expected())
    assert calls == [("num_seqs", 2), ("num_tokens", 2), ("num_tokens", 79)]
