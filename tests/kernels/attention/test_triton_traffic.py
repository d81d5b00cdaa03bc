"""The bytes that attention's kernels move, beside those that any must: queries, outputs, keys and values once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.kernels.attention.paged_batches import Shape, make_batch

if TYPE_CHECKING:
    from tests.kernels.interpreted_memory import Traffic

SHAPE = Shape(num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float16)
MOST = 1.1


@pytest.mark.parametrize("lengths", [[255] * 8, [1024] * 4, [5000, 700, 30]], ids=["short", "split", "uneven"])
@pytest.mark.parametrize("window", [None, 700])
def test_decodes(traffic: Traffic, lengths: list[int], window: int | None) -> None:
    from kernels.attention.triton.backend import TritonBackend

    batch = make_batch([(1, length) for length in lengths], SHAPE)
    output = batch.run(TritonBackend(), window)
    num_keys = sum(min(length, window or length) for length in lengths)
    bytes_per_key = 2 * SHAPE.num_kv_heads * SHAPE.head_dim * SHAPE.dtype.itemsize
    necessary = num_keys * bytes_per_key + batch.query.nbytes + output.nbytes
    assert necessary <= traffic.total <= MOST * necessary, f"{traffic.total / necessary:.3f} of the necessary bytes"


@pytest.mark.parametrize("window", [None, 100])
def test_a_chunk_of_a_prompt(traffic: Traffic, window: int | None) -> None:
    """A program requests what its 32 queries see: others request the same, from the cache."""
    from kernels.attention.triton.backend import TritonBackend

    query_len, seq_len, tile = 256, 400, 32
    batch = make_batch([(query_len, seq_len)], SHAPE)
    output = batch.run(TritonBackend(), window)
    bytes_per_key = 2 * SHAPE.num_kv_heads * SHAPE.head_dim * SHAPE.dtype.itemsize
    first_keys = [max(end - tile - (window or seq_len) + 1, 0) // 64 * 64 for end in range(176, 401, tile)]
    num_requested = sum(end - first for end, first in zip(range(176, 401, tile), first_keys, strict=True))
    num_keys = seq_len - first_keys[0]
    necessary = num_keys * bytes_per_key + batch.query.nbytes + output.nbytes
    assert necessary <= traffic.distinct <= MOST * necessary
    again = (num_requested - num_keys) * bytes_per_key
    assert necessary + again <= traffic.total <= MOST * (necessary + again)
