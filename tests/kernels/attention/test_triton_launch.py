"""Every launch of any batch is one that the warm-up's batches launch."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.attention.triton_launch import LaunchConfig, LayerShape, batches_of_every_launch, choose_launch

LAYERS = st.builds(
    LayerShape,
    group_size=st.integers(1, 20),
    num_kv_heads=st.integers(1, 40),
    head_dim=st.integers(1, 256),
    element_size=st.sampled_from([2, 4]),
    sliding_window=st.none() | st.integers(1, 20000),
    num_multiprocessors=st.sampled_from([1, 16, 108, 132, 148]),
)
QWEN3_8B = LayerShape(4, 8, 128, 2, None, 132)
HALF_WINDOWS = {QWEN3_8B, LayerShape(4, 8, 128, 2, 1500, 132)}


def warmed_launches(
    layers: set[LayerShape], max_query_len: int, max_seq_len: int
) -> dict[LayerShape, set[LaunchConfig]]:
    batches = batches_of_every_launch(layers, max_query_len=max_query_len, max_seq_len=max_seq_len)
    assert all(query_len <= seq_len for query_len, seq_len in batches)
    assert all(query_len <= max_query_len and seq_len <= max_seq_len for query_len, seq_len in batches)
    return {
        layer: {choose_launch(layer, num_seqs=1, max_query_len=query, max_seq_len=seq) for query, seq in batches}
        for layer in layers
    }


@settings(max_examples=400, deadline=None)
@given(
    layers=st.sets(LAYERS, min_size=1, max_size=2),
    limits=st.tuples(st.integers(1, 9000), st.integers(1, 50_000)),
    query_len=st.just(1) | st.integers(1, 140) | st.integers(1, 9000),
    seq_len=st.integers(1, 50_000),
    num_seqs=st.integers(1, 9) | st.integers(1, 1024),
)
def test_any_batch_launches_what_was_warmed_up(
    layers: set[LayerShape], limits: tuple[int, int], query_len: int, seq_len: int, num_seqs: int
) -> None:
    max_query_len, max_seq_len = min(limits), limits[1]
    warmed = warmed_launches(layers, max_query_len, max_seq_len)
    query_len = min(query_len, max_query_len)
    seq_len = min(max(seq_len, query_len), max_seq_len)
    for layer in layers:
        launch = choose_launch(layer, num_seqs=num_seqs, max_query_len=query_len, max_seq_len=seq_len)
        assert launch in warmed[layer]


def test_all_batches_of_an_8b_model_on_an_h200() -> None:
    """Every number of sequences, query length, and context that is a multiple of 16 tokens, or next to one of 256."""
    warmed = warmed_launches(HALF_WINDOWS, 2048, 40960)
    contexts = sorted({*range(1, 40961, 16), *(256 * n + near for n in range(1, 160) for near in (-1, 0, 1))})
    for layer in HALF_WINDOWS:
        decodes = {
            choose_launch(layer, num_seqs=num_seqs, max_query_len=1, max_seq_len=context)
            for num_seqs in (*range(1, 40), 64, 256, 1024)
            for context in contexts
        }
        prefills = {
            choose_launch(layer, num_seqs=3, max_query_len=query_len, max_seq_len=40960) for query_len in range(2, 2049)
        }
        assert decodes | prefills <= warmed[layer]


def test_the_warm_up_of_an_8b_model_is_short() -> None:
    batches = batches_of_every_launch({QWEN3_8B}, max_query_len=2048, max_seq_len=40960)
    assert batches == [(1, 1), (5, 5), (9, 9), (17, 17), (1, 512), (1, 1024), (1, 2048), (1, 4096), (1, 8192)]


@given(layer=LAYERS, num_seqs=st.integers(1, 512), query_len=st.integers(1, 9000), seq_len=st.integers(1, 50_000))
@example(layer=QWEN3_8B, num_seqs=1, query_len=1, seq_len=50_000)
def test_a_launch_suits_the_kernels(layer: LayerShape, num_seqs: int, query_len: int, seq_len: int) -> None:
    launch = choose_launch(layer, num_seqs=num_seqs, max_query_len=query_len, max_seq_len=max(seq_len, query_len))
    for size in (launch.rows, launch.num_splits, layer.dim_padded, layer.keys_per_tile):
        assert size & (size - 1) == 0
    assert launch.rows >= max(16, layer.group_size)
    assert layer.dim_padded >= max(16, layer.head_dim)
    assert 1 <= launch.num_splits <= 64
    assert launch.num_splits == 1 or query_len == 1
