"""The tiles and splits suit the kernels for every shape, and the number of splits is never more than is stored."""

from __future__ import annotations

from math import ceil

from hypothesis import example, given
from hypothesis import strategies as st

from kernels.attention.triton.layer_shape import KEYS_PER_SPLIT, LayerShape, most_splits
from kernels.attention.window import Chunk, first_key

LAYERS = st.builds(
    LayerShape,
    group_size=st.integers(1, 20),
    num_kv_heads=st.integers(1, 40),
    head_dim=st.integers(1, 512),
    element_size=st.sampled_from([2, 4]),
    window=st.none() | st.integers(1, 20000) | st.builds(Chunk, st.integers(1, 20000)),
    is_fp8=st.booleans(),
)


@given(layer=LAYERS)
def test_tiles_suit_the_kernels(layer: LayerShape) -> None:
    for size in (layer.decode_rows, layer.prefill_rows, layer.dim_padded, layer.keys_per_tile):
        assert size & (size - 1) == 0
        assert size >= 16
    assert layer.prefill_rows >= layer.decode_rows >= layer.group_size
    assert layer.dim_padded >= max(layer.head_dim, 32 if layer.is_fp8 else 16)  # tl.dot takes half of a key in FP8
    assert layer.max_splits & (layer.max_splits - 1) == 0
    assert layer.max_splits * layer.num_kv_heads >= 128
    assert KEYS_PER_SPLIT % layer.keys_per_tile == 0


@given(layer=LAYERS, seq_len=st.integers(1, 200_000), longest=st.integers(1, 200_000))
@example(layer=LayerShape(1, 1, 64, 2, 193), seq_len=260, longest=260)  # the window's first key is the last of a tile
def test_a_context_has_no_more_splits_than_are_stored(layer: LayerShape, seq_len: int, longest: int) -> None:
    """As decode.py divides it."""
    seq_len = min(seq_len, longest)
    tile = layer.keys_per_tile
    num_keys = seq_len - first_key(layer.window, seq_len - 1) // tile * tile
    tiles_per_split = ceil(ceil(num_keys / layer.max_splits) / tile)
    num_splits = ceil(num_keys / max(tiles_per_split * tile, KEYS_PER_SPLIT))
    assert num_splits <= most_splits(layer, longest) <= layer.max_splits
