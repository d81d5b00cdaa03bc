"""The cache write, by torch and by Triton, against the reference. Slots that are not written must keep their NaN."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from kernels.cache import reference
from kernels.cache.fp8 import FP8
from kernels.cache.store_kvcache import store_kvcache
from tests.pairs import each_pair

Store = Callable[..., None]
NUM_BLOCKS = 5
SLOTS = {
    "one token": [7],
    "out of order": [9, 0, 4, 3, 19],
    "with padding": [-1, 2, -1, 11, -1],
    "padding alone": [-1, -1],
    "nothing": [],
}


@pytest.fixture(params=["torch", "triton"])
def store(request: pytest.FixtureRequest) -> Store:
    if request.param == "torch":
        return store_kvcache
    request.getfixturevalue("kernel_device")
    from kernels.cache.triton.store_kvcache import store_kvcache_triton

    return store_kvcache_triton


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _run(store: Store, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
    """Write to empty caches, and return them with a block of memory before each, where a slot of -1 would lead."""
    memory = key.new_full((2, 1 + NUM_BLOCKS, 4, *key.shape[1:]), math.nan)
    store(key, value, memory[0, 1:], memory[1, 1:], slot_mapping)
    return memory


def _check(store: Store, key: torch.Tensor, value: torch.Tensor, slots: list[int]) -> None:
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=key.device)
    expected = _run(reference.store_kvcache, key, value, slot_mapping)
    torch.testing.assert_close(_run(store, key, value, slot_mapping), expected, rtol=0, atol=0, equal_nan=True)


@each_pair(
    indirect=["store"],
    store=["torch", "triton"],
    slots=SLOTS,
    heads=[(1, 1), (2, 80), (3, 16), (8, 128)],
    dtype=[torch.float32, torch.float16, torch.bfloat16],
)
def test_writes_each_token_to_its_slot_and_nothing_else(
    store: Store, device: torch.device, slots: list[int], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    key, value = torch.randn(2, len(slots), *heads).to(device, dtype)
    _check(store, key, value, slots)


@each_pair(
    indirect=["store"],
    store=["torch", "triton"],
    slots=SLOTS,
    heads=[(1, 1), (2, 80), (3, 16), (8, 128)],
    dtype=[torch.float32, torch.float16, torch.bfloat16],
)
def test_a_cache_in_fp8(
    store: Store, device: torch.device, slots: list[int], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    key, value = 300.0 * torch.randn(2, len(slots), *heads).to(device, dtype)  # some are beyond the largest number
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    caches = []
    for write in (store, reference.store_kvcache):
        memory = torch.full((2, NUM_BLOCKS, 4, *heads), -1, dtype=torch.int8, device=device).view(FP8)
        write(key, value, memory[0], memory[1], slot_mapping, 0.5, 1.7)
        caches.append(memory.view(torch.uint8))
    assert torch.equal(*caches)


@pytest.mark.parametrize("slots", [[9, 0, 4], [9, -1, 4]])
def test_key_and_value_may_be_slices_of_a_fused_projection(
    store: Store, device: torch.device, slots: list[int]
) -> None:
    fused = torch.randn(3, (4 + 2 + 2) * 16, device=device)  # 4 query heads, 2 key heads, 2 value heads
    key, value = (part.unflatten(1, (-1, 16)) for part in (fused[:, 64:96], fused[:, 96:]))
    assert not key.is_contiguous()
    _check(store, key, value, slots)


def test_key_and_value_may_have_any_strides(store: Store, device: torch.device) -> None:
    key = torch.randn(16, 2, 3, device=device).permute(2, 1, 0)
    value = torch.randn(3, 16, 2, device=device).transpose(1, 2)
    assert key.stride() == (1, 3, 6)
    assert value.stride() == (32, 1, 2)
    _check(store, key, value, [9, -1, 4])
