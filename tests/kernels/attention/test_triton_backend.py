"""The Triton backend against the reference: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from kernels.attention import reference
from kernels.attention.window import Chunk, Window
from tests.kernels.attention.paged_batches import (
    BATCHES,
    OPTIONS,
    PADDING,
    SHAPES,
    TOLERANCES,
    Batch,
    Shape,
    assert_matches,
    expanded,
    make_batch,
    with_latents,
    with_padding_of_length_one,
    without_blocks_before,
)

if TYPE_CHECKING:
    from kernels.attention.triton.backend import TritonBackend

SMALL = Shape(num_heads=2, num_kv_heads=1, head_dim=16)
WIDE = {
    "width 128, groups of 8": Shape(num_heads=8, num_kv_heads=1, head_dim=128),
    "width 128, groups of 16": Shape(num_heads=16, num_kv_heads=1, head_dim=128, dtype=torch.bfloat16),
    "width 256, groups of 4": Shape(num_heads=4, num_kv_heads=1, head_dim=256, dtype=torch.float16),
    "width 256, groups of 20": Shape(num_heads=20, num_kv_heads=1, head_dim=256),
    "width 512, groups of 8": Shape(num_heads=8, num_kv_heads=1, head_dim=512, dtype=torch.bfloat16),
}
MANY_SPLITS = [(1, 2100)]
UNEVEN_SPLITS = [(1, 600), (1, 1), (1, 65), PADDING, (1, 257)]


@pytest.fixture
def backend(kernel_device: torch.device) -> TritonBackend:
    from kernels.attention.triton.backend import TritonBackend

    return TritonBackend()


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
    batch = make_batch(lengths, shape, device=kernel_device)
    assert_matches(batch.run(backend, window), batch.expected(window))


@pytest.mark.parametrize("window", [None, 70, Chunk(48)])
@pytest.mark.parametrize("options", OPTIONS, ids=" and ".join)
@pytest.mark.parametrize("batch_name", ["decodes, then chunks", "padded mixed", "uneven splits"])
def test_softcaps_and_sinks(
    backend: TritonBackend,
    kernel_device: torch.device,
    batch_name: str,
    options: tuple[str, ...],
    window: Window | None,
) -> None:
    lengths = UNEVEN_SPLITS if batch_name == "uneven splits" else BATCHES[batch_name]
    batch = make_batch(lengths, Shape(), device=kernel_device)
    expected = batch.expected(window, *options)
    assert_matches(batch.run(backend, window, *options), expected)
    assert not torch.allclose(expected, batch.expected(window), atol=1e-2)  # the options matter


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # infinities, as on a GPU
@pytest.mark.parametrize("sink", [-torch.inf, -300.0, 300.0])
def test_sinks_of_any_size(backend: TritonBackend, kernel_device: torch.device, sink: float) -> None:
    """-inf takes nothing, and a large one all that the keys have."""
    for lengths in ([(1, 600), PADDING, (4, 30)], BATCHES["decodes, then chunks"]):
        batch = make_batch(lengths, SMALL, device=kernel_device)
        sinks = torch.full((SMALL.num_heads,), sink, device=kernel_device)
        output = backend.forward(replace(batch.inputs(), sinks=sinks))
        assert_matches(output, batch.expected() if sink < 0 else torch.zeros_like(output))


@pytest.mark.parametrize("shape", WIDE.values(), ids=WIDE.keys())
def test_wide_heads_and_large_groups(backend: TritonBackend, kernel_device: torch.device, shape: Shape) -> None:
    batch = make_batch([(1, 300), (1, 20), (9, 9), (3, 70)], shape, device=kernel_device)
    assert_matches(batch.run(backend, None, "softcap", "sinks"), batch.expected(None, "softcap", "sinks"))
    assert_matches(batch.run(backend, 50), batch.expected(50))


def test_no_sequences(backend: TritonBackend, kernel_device: torch.device) -> None:
    batch = make_batch([], SMALL, device=kernel_device)
    assert batch.run(backend, None, "sinks").shape == (0, SMALL.num_heads, SMALL.head_dim)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("block_size", [1, 8, 64, 256])
def test_every_dtype_and_block_size(
    backend: TritonBackend, kernel_device: torch.device, dtype: torch.dtype, block_size: int
) -> None:
    for lengths in (BATCHES["mixed"], UNEVEN_SPLITS):
        batch = make_batch(lengths, Shape(block_size=block_size, dtype=dtype), device=kernel_device)
        assert_matches(batch.run(backend), batch.expected())


@pytest.mark.parametrize("window", [None, 1, 63, 64, 65, 150, 1000, Chunk(1), Chunk(64), Chunk(90), Chunk(1000)])
def test_windows_around_the_size_of_a_tile(
    backend: TritonBackend, kernel_device: torch.device, window: Window | None
) -> None:
    batch = make_batch([(70, 200), (1, 65), (66, 66)], SMALL, device=kernel_device)
    assert_matches(batch.run(backend, window), batch.expected(window))


@pytest.mark.parametrize("window", [None, 1, 512, 600, 1200, Chunk(1100), Chunk(512)])
@pytest.mark.parametrize("lengths", [MANY_SPLITS, UNEVEN_SPLITS], ids=["many splits", "uneven splits"])
def test_long_decodes_are_split_over_the_context(
    backend: TritonBackend, kernel_device: torch.device, lengths: list[tuple[int, int]], window: Window | None
) -> None:
    batch = make_batch(lengths, SMALL, device=kernel_device)
    assert_matches(batch.run(backend, window), batch.expected(window))


@pytest.mark.parametrize("window", [None, 1, 600, Chunk(1500)])
def test_long_decodes_beside_a_prefill_are_split_too(
    backend: TritonBackend, kernel_device: torch.device, window: Window | None
) -> None:
    from kernels.attention.triton.backend import _layer_shape, _plan_splits

    lengths = [(1, 2100), (1, 600), PADDING, (1, 65), (70, 200), (3, 40), (1, 300)]
    batch = make_batch(lengths, SMALL, device=kernel_device)
    assert_matches(batch.run(backend, window), batch.expected(window))
    plan = _plan_splits(batch.metadata, _layer_shape(batch.inputs(window)))
    splits = {None: [9, 3, 1, 1], 1: [1, 1, 1, 1], 600: [3, 3, 1, 1], Chunk(1500): [3, 3, 1, 1]}[window]
    assert plan.first_item.diff().tolist() == splits
    listed = [sequence for sequence, count in enumerate(splits) for _ in range(count)]
    assert plan.item_sequences[: len(listed)].tolist() == listed


@pytest.mark.long
def test_layers_with_other_heads_share_no_splits(backend: TritonBackend, kernel_device: torch.device) -> None:
    """Their splits are multiples of another tile, so that those of the first layer would end before the context."""
    narrow, wide = (
        make_batch(
            [(1, 4200)], Shape(num_heads=1, num_kv_heads=1, head_dim=width, block_size=256), device=kernel_device
        )
        for width in (16, 128)
    )
    wide = replace(wide, metadata=narrow.metadata)
    backend.forward(narrow.inputs())
    assert_matches(wide.run(backend), wide.expected())


@pytest.mark.parametrize(("window", "options"), [(None, ("softcap", "sinks")), (300, ()), (Chunk(310), ())])
def test_what_a_sequence_gets_does_not_depend_on_the_batch(
    backend: TritonBackend, kernel_device: torch.device, window: Window | None, options: tuple[str, ...]
) -> None:
    """The same bits alone and in every batch: decodes whatever is beside them, queries of a prompt however chunked."""
    lengths = [(1, 4200), (1, 257), (1, 700), *[(1, 3)] * 10, (40, 333), (3, 50), (130, 700)]
    batch = make_batch(lengths, SMALL, device=kernel_device)
    together = batch.run(backend, window, *options)
    bounds = batch.metadata.cu_seqlens_q.tolist()
    for index in (0, 1, 2, 12, 13, 14, 15):
        own = slice(bounds[index], bounds[index + 1])
        alone = batch.one_sequence(index)
        assert torch.equal(alone.run(backend, window, *options), together[own]), lengths[index]
    last = batch.one_sequence(15)
    for num_computed in (1, 16, 50, 129):  # the rest of the prompt is another chunk
        chunk = last.last_queries(130 - num_computed)
        assert torch.equal(chunk.run(backend, window, *options), together[-130:][num_computed:])


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


LATENTS = {  # elements of a key and of a value, query heads, tokens of a block
    "DeepSeek V3": (576, 512, 32, 16),
    "GLM-4.7-Flash": (576, 512, 20, 16),
    "MiniCPM 3, odd blocks": (288, 256, 5, 64),
    "odd ranks": (52, 40, 7, 4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", LATENTS.values(), ids=LATENTS.keys())
def test_latents(
    backend: TritonBackend, kernel_device: torch.device, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Values that are the beginnings of keys: decodes of one split and of several, padding, and chunks of prompts."""
    head_dim, value_dim, num_heads, block_size = shape
    lengths = [(1, 300), (1, 20), PADDING, (9, 70)]
    batch = make_batch(lengths, Shape(num_heads, 1, head_dim, block_size, dtype), device=kernel_device)
    batch = with_latents(batch, value_dim)
    output = batch.run(backend)
    assert_matches(output, batch.expected())
    for index, own in ((0, slice(0, 1)), (3, slice(3, 12))):
        assert torch.equal(batch.one_sequence(index).run(backend), output[own]), "the batch changes bits"


EXPANDED = {  # elements of a head's own key, of what all heads' keys share, and of a value; heads, tokens of a block
    "DeepSeek V3": (128, 64, 128, 2, 16),
    "GLM-4.7-Flash": (192, 64, 256, 1, 16),
    "Mistral 4, odd blocks": (64, 64, 128, 3, 4),
    "odd sizes": (20, 10, 36, 5, 16),
    "odd sizes, short values": (36, 16, 20, 2, 256),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", EXPANDED.values(), ids=EXPANDED.keys())
def test_expanded_latents(
    backend: TritonBackend, kernel_device: torch.device, shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    """Prompts, and chunks after a prefix, around the size of a tile."""
    key_dim, rope_dim, value_dim, num_heads, block_size = shape
    width = key_dim + value_dim + rope_dim
    lengths = [(140, 150), (17, 17), (2, 70)]
    batch = make_batch(lengths, Shape(num_heads, num_heads, width, block_size, dtype), device=kernel_device)
    inputs = expanded(batch, key_dim, value_dim)
    assert_matches(backend.forward(inputs), reference.attention(inputs))


@pytest.mark.parametrize("window", [1, 7, 16, Chunk(10), Chunk(16)])
def test_blocks_before_the_window_may_be_missing(
    backend: TritonBackend, kernel_device: torch.device, window: Window
) -> None:
    whole = make_batch([(1, 40), (3, 50), (9, 9)], Shape(block_size=4), device=kernel_device)
    freed = without_blocks_before(whole, window)
    assert_matches(freed.run(backend, window), whole.expected(window))


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
