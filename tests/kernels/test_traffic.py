"""The bytes that a linear layer and the cache write move, beside those that any kernel must move."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.kernels.interpreted_memory import Traffic

MOST = 1.1
NUM_INPUTS, NUM_OUTPUTS, TILE = 512, 512, 64


@pytest.mark.parametrize("num_rows", [1, 4, 16, 64, 128])
def test_a_linear_layer(num_rows: int, traffic: Traffic) -> None:
    """Memory gives all once. Programs request the rows again for each tile of outputs, the weights for each of rows."""
    from kernels.linear.triton import linear_triton

    rows = torch.ones(num_rows, NUM_INPUTS, dtype=torch.float16)
    weight = torch.ones(NUM_OUTPUTS, NUM_INPUTS, dtype=torch.float16)
    output = linear_triton(rows, weight, None)
    necessary = rows.nbytes + weight.nbytes + output.nbytes
    again = rows.nbytes * (NUM_OUTPUTS // TILE - 1) + weight.nbytes * (max(num_rows // TILE, 1) - 1)
    assert traffic.distinct == necessary
    assert traffic.total == necessary + again


@pytest.mark.parametrize("num_tokens", [1, 33])
def test_the_cache_write(num_tokens: int, traffic: Traffic) -> None:
    from kernels.cache.triton.store_kvcache import store_kvcache_triton

    key, value = torch.ones(2, num_tokens, 8, 128, dtype=torch.float16)
    caches, slots = torch.zeros(2, 3, 16, 8, 128, dtype=torch.float16), torch.arange(num_tokens)
    store_kvcache_triton(key, value, *caches, slots)
    assert traffic.total == 2 * (key.nbytes + value.nbytes) + slots.nbytes
