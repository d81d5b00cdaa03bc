"""The Triton backend on a cache in FP8 against the reference, which reads the same codes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from kernels.attention import reference
from kernels.attention.base import AttentionInputs
from kernels.attention.window import Chunk, Window
from kernels.cache.fp8 import FP8, from_fp8, to_fp8
from tests.kernels.attention.paged_batches import (
    BATCHES,
    OPTIONS,
    PADDING,
    SHAPES,
    TOLERANCES,
    Batch,
    Shape,
    assert_matches,
    make_batch,
)

if TYPE_CHECKING:
    from kernels.attention.triton.backend import TritonBackend
    from tests.kernels.interpreted_memory import Traffic

KEY_SCALE, VALUE_SCALE = 0.37, 2.7
UNEVEN_SPLITS = [(1, 600), (1, 1), (1, 65), PADDING, (1, 257)]
WIDE = {
    "width 128, groups of 8": Shape(num_heads=8, num_kv_heads=1, head_dim=128, dtype=torch.bfloat16),
    "width 256, groups of 4": Shape(num_heads=4, num_kv_heads=1, head_dim=256, dtype=torch.float16),
    "width 512, groups of 3": Shape(num_heads=3, num_kv_heads=1, head_dim=512, dtype=torch.bfloat16),
}


@pytest.fixture
def backend(kernel_device: torch.device) -> TritonBackend:
    from kernels.attention.triton.backend import TritonBackend

    return TritonBackend()


def in_fp8(batch: Batch, window: Window | None = None, *options: str) -> AttentionInputs:
    """Return a layer's inputs with the batch's keys and values in FP8; unused slots hold the largest numbers."""
    return replace(
        batch.inputs(window, *options),
        key_cache=to_fp8(batch.key_cache, KEY_SCALE),
        value_cache=to_fp8(batch.value_cache, VALUE_SCALE),
        key_scale=KEY_SCALE,
        value_scale=VALUE_SCALE,
    )


def check(backend: TritonBackend, batch: Batch, window: Window | None = None, *options: str) -> None:
    inputs = in_fp8(batch, window, *options)
    assert_matches(backend.forward(inputs), reference.attention(inputs))


@pytest.mark.parametrize("window", [None, 5, Chunk(12)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
def test_matches_the_reference(
    backend: TritonBackend,
    kernel_device: torch.device,
    lengths: list[tuple[int, int]],
    shape: Shape,
    window: Window | None,
) -> None:
    check(backend, make_batch(lengths, shape, device=kernel_device), window)


@pytest.mark.parametrize("window", [None, 70, Chunk(48)])
@pytest.mark.parametrize("options", OPTIONS, ids=" and ".join)
@pytest.mark.parametrize("lengths", [BATCHES["decodes, then chunks"], UNEVEN_SPLITS], ids=["chunks", "splits"])
def test_softcaps_sinks_and_windows(
    backend: TritonBackend,
    kernel_device: torch.device,
    lengths: list[tuple[int, int]],
    options: tuple[str, ...],
    window: Window | None,
) -> None:
    check(backend, make_batch(lengths, Shape(), device=kernel_device), window, *options)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("block_size", [16, 1, 64, 256])
def test_every_dtype_and_block_size(
    backend: TritonBackend, kernel_device: torch.device, dtype: torch.dtype, block_size: int
) -> None:
    for lengths in (BATCHES["mixed"], UNEVEN_SPLITS):
        check(backend, make_batch(lengths, Shape(block_size=block_size, dtype=dtype), device=kernel_device))


@pytest.mark.parametrize("shape", WIDE.values(), ids=WIDE.keys())
def test_wide_heads_and_large_groups(backend: TritonBackend, kernel_device: torch.device, shape: Shape) -> None:
    batch = make_batch([(1, 300), (1, 20), (9, 9), (3, 70)], shape, device=kernel_device)
    check(backend, batch, None, "softcap", "sinks")
    check(backend, batch, 50)


def test_many_splits(backend: TritonBackend, kernel_device: torch.device) -> None:
    check(backend, make_batch([(1, 2100)], Shape(num_heads=2, num_kv_heads=1, head_dim=16), device=kernel_device))


def test_an_answer_is_that_of_the_numbers_that_are_stored(backend: TritonBackend, kernel_device: torch.device) -> None:
    """The same backend on a cache in float32, to which the codes are decoded."""
    inputs = in_fp8(make_batch(BATCHES["mixed"], Shape(), device=kernel_device))
    decoded = replace(
        inputs,
        key_cache=from_fp8(inputs.key_cache, KEY_SCALE),
        value_cache=from_fp8(inputs.value_cache, VALUE_SCALE),
        key_scale=1.0,
        value_scale=1.0,
    )
    assert inputs.is_fp8
    assert not decoded.is_fp8
    assert_matches(backend.forward(inputs), backend.forward(decoded))


def test_decodes_move_one_byte_a_number(traffic: Traffic) -> None:
    from kernels.attention.triton.backend import TritonBackend

    shape, length = Shape(num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float16), 1000
    inputs = in_fp8(make_batch([(1, length)] * 4, shape))
    assert inputs.key_cache.dtype == FP8
    output = TritonBackend().forward(inputs)
    necessary = 2 * 4 * length * shape.num_kv_heads * shape.head_dim + inputs.query.nbytes + output.nbytes
    assert necessary <= traffic.total <= 1.15 * necessary  # with the parts of split contexts
