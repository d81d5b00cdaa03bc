"""The Triton backend against the reference: on the GPU where there is one, else in Triton's interpreter.

The interpreter multiplies bfloat16 wrongly, so bfloat16 is tested on a GPU only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.kernels.attention.paged_batches import (
    BATCHES,
    PADDING,
    SHAPES,
    TOLERANCES,
    Batch,
    Shape,
    assert_matches,
    make_batch,
    with_padding_of_length_one,
    without_blocks_before,
)

if TYPE_CHECKING:
    from kernels.attention.triton_backend import TritonBackend

SMALL = Shape(num_heads=2, num_kv_heads=1, head_dim=16)
MANY_SPLITS = [(1, 2100)]
UNEVEN_SPLITS = [(1, 600), (1, 1), (1, 65), PADDING, (1, 257)]


@pytest.fixture
def backend(kernel_device: torch.device) -> TritonBackend:
    from kernels.attention.triton_backend import TritonBackend

    return TritonBackend()


@pytest.mark.parametrize("sliding_window", [None, 5])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
def test_matches_the_reference(
    backend: TritonBackend,
    kernel_device: torch.device,
    lengths: list[tuple[int, int]],
    shape: Shape,
    sliding_window: int | None,
) -> None:
    batch = make_batch(lengths, shape, device=kernel_device)
    assert_matches(batch.run(backend, sliding_window), batch.expected(sliding_window))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("block_size", [1, 8, 64, 256])
def test_every_dtype_and_block_size(
    backend: TritonBackend, kernel_device: torch.device, dtype: torch.dtype, block_size: int
) -> None:
    if dtype == torch.bfloat16 and kernel_device.type == "cpu":
        pytest.skip("the interpreter multiplies bfloat16 wrongly")
    for lengths in (BATCHES["mixed"], UNEVEN_SPLITS):
        batch = make_batch(lengths, Shape(block_size=block_size, dtype=dtype), device=kernel_device)
        assert_matches(batch.run(backend), batch.expected())


@pytest.mark.parametrize("sliding_window", [None, 1, 63, 64, 65, 150, 1000])
def test_windows_around_the_size_of_a_tile(
    backend: TritonBackend, kernel_device: torch.device, sliding_window: int | None
) -> None:
    batch = make_batch([(70, 200), (1, 65), (66, 66)], SMALL, device=kernel_device)
    assert_matches(batch.run(backend, sliding_window), batch.expected(sliding_window))


@pytest.mark.parametrize("sliding_window", [None, 1, 512, 600, 1200])
@pytest.mark.parametrize("lengths", [MANY_SPLITS, UNEVEN_SPLITS], ids=["many splits", "uneven splits"])
def test_long_decodes_are_split_over_the_context(
    backend: TritonBackend, kernel_device: torch.device, lengths: list[tuple[int, int]], sliding_window: int | None
) -> None:
    batch = make_batch(lengths, SMALL, device=kernel_device)
    assert_matches(batch.run(backend, sliding_window), batch.expected(sliding_window))


@pytest.mark.parametrize("sliding_window", [None, 1, 600])
def test_long_decodes_beside_a_prefill_are_split_too(
    backend: TritonBackend, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch, sliding_window: int | None
) -> None:
    from kernels.attention import triton_backend

    launched: list[tuple[str, int, int]] = []
    for name in ("_launch_split_decode", "_launch_mixed"):
        run: Any = getattr(triton_backend, name)

        def record(output: Any, inputs: Any, part: Any, layer: Any, launch: Any, run: Any = run) -> None:
            launched.append((run.__name__, part.num_seqs, launch.rows))
            run(output, inputs, part, layer, launch)

        monkeypatch.setattr(triton_backend, name, record)
    lengths = [(1, 2100), (1, 600), PADDING, (1, 65), (70, 200), (3, 40), (1, 300)]
    batch = make_batch(lengths, SMALL, device=kernel_device)
    assert_matches(batch.run(backend, sliding_window), batch.expected(sliding_window))
    if sliding_window != 1:
        assert launched == [("_launch_split_decode", 4, 16), ("_launch_mixed", 3, 32)]


def test_as_many_decodes_as_fill_tiles_before_a_prefill(backend: TritonBackend, kernel_device: torch.device) -> None:
    """A prefill's tiles begin in the middle of a tile of the batch's queries, or at its start."""
    for num_decodes in (15, 16, 17, 31, 32, 33):
        lengths = [(1, 3 + i) for i in range(num_decodes)] + [(40, 41), (5, 5)]
        batch = make_batch(lengths, SMALL, device=kernel_device)
        assert_matches(batch.run(backend), batch.expected())


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 8, 9])
def test_every_tile_finds_its_sequence(backend: TritonBackend, kernel_device: torch.device, num_sequences: int) -> None:
    lengths = [(1 + 5 * i % 23, 30 + i) for i in range(num_sequences)]
    batch = make_batch(lengths, SMALL, device=kernel_device)
    assert_matches(batch.run(backend), batch.expected())


@pytest.mark.parametrize("lengths", [[(1, 20), PADDING, (4, 10), PADDING], UNEVEN_SPLITS], ids=["mixed", "decodes"])
def test_padding_that_claims_one_token_yields_zeros(
    backend: TritonBackend, kernel_device: torch.device, lengths: list[tuple[int, int]]
) -> None:
    batch = with_padding_of_length_one(make_batch(lengths, SMALL, device=kernel_device))
    output = batch.run(backend)
    assert_matches(output, batch.expected())
    assert not output[batch.metadata.slot_mapping < 0].any()


def test_rows_behind_the_last_sequence_are_zero(backend: TritonBackend, kernel_device: torch.device) -> None:
    for lengths in (UNEVEN_SPLITS, BATCHES["mixed"]):
        batch = make_batch(lengths, SMALL, device=kernel_device)
        padded = torch.cat([batch.query, torch.ones_like(batch.query[:3])])
        output = Batch(padded, batch.key_cache, batch.value_cache, batch.metadata).run(backend)
        assert_matches(output[:-3], batch.expected())
        assert not output[-3:].any()


@pytest.mark.parametrize("sliding_window", [1, 7, 16])
def test_blocks_before_the_window_may_be_missing(
    backend: TritonBackend, kernel_device: torch.device, sliding_window: int
) -> None:
    whole = make_batch([(1, 40), (3, 50), (9, 9)], Shape(block_size=4), device=kernel_device)
    freed = without_blocks_before(whole, sliding_window)
    assert_matches(freed.run(backend, sliding_window), whole.expected(sliding_window))


def test_queries_may_be_a_slice_of_a_fused_projection(backend: TritonBackend, kernel_device: torch.device) -> None:
    for lengths in (UNEVEN_SPLITS, BATCHES["mixed"]):
        batch = make_batch(lengths, SMALL, device=kernel_device)
        fused = torch.cat([batch.query, torch.full_like(batch.query, torch.nan)], dim=1)
        sliced = Batch(fused[:, : batch.query.shape[1]], batch.key_cache, batch.value_cache, batch.metadata)
        assert_matches(sliced.run(backend), batch.expected())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("lengths", [[(1, 600), (1, 300)], [(4, 60), (1, 30)]], ids=["decodes", "mixed"])
def test_a_captured_step_follows_new_lengths(
    backend: TritonBackend, kernel_device: torch.device, lengths: list[tuple[int, int]]
) -> None:
    batch = make_batch(lengths, SMALL, device=kernel_device)
    batch.run(backend)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = batch.run(backend)
    batch.metadata.seq_lens.sub_(7)
    graph.replay()
    assert_matches(output, batch.expected())
