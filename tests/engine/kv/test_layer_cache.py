"""What a layer declares that it caches."""

from __future__ import annotations

from engine.kv.layer_cache import (
    KeyValue,
    Latent,
    SharedWith,
    State,
    bytes_per_state,
    bytes_per_token,
    in_dtype,
    windows_of,
    without_windows,
)
from kernels.attention.window import Chunk


def test_keys_and_values_count_for_every_head_of_every_layer() -> None:
    layers = [KeyValue(heads=2, key_dim=192, value_dim=128), KeyValue(heads=8, key_dim=64, value_dim=64)]
    assert [layer.elements_per_token for layer in layers] == [640, 1024]
    assert bytes_per_token(layers, element_size=2) == 2 * (640 + 1024)


def test_a_latent_counts_once_for_all_heads() -> None:
    layers = [Latent(rank=512, rope_dim=64)] * 61  # DeepSeek-V3
    assert bytes_per_token(layers, element_size=2) == 61 * 576 * 2
    assert bytes_per_token(layers, element_size=2, window=128) == 0
    assert windows_of(layers) == ()
    assert without_windows(layers) == tuple(layers)


def test_keys_and_values_in_fp8_take_a_byte_a_number() -> None:
    layers = [KeyValue(8, 64, 64), State(((4, 3),)), KeyValue(8, 64, 64, window=9), SharedWith(0)]
    fp8 = in_dtype(layers, "fp8")
    assert [bytes_per_token(fp8, 2, window) for window in (None, 9)] == [1024, 1024]
    assert fp8[1::2] == (layers[1], layers[3])  # states and what is shared have no dtype
    assert in_dtype(fp8, "auto") == tuple(layers)
    assert in_dtype([Latent(512, 64)], "fp8") == (Latent(512, 64),)


def test_states_take_memory_for_each_sequence_and_none_for_a_token() -> None:
    layers = [KeyValue(heads=2, key_dim=8, value_dim=8), State(((4, 3), (2, 8, 8))), State(((5,),))]
    assert bytes_per_token(layers, element_size=2) == 2 * 32
    assert bytes_per_state(layers) == 4 * (12 + 128 + 5)


def test_a_layer_that_shares_takes_no_memory_whatever_it_shares() -> None:
    own = [KeyValue(2, 8, 8, window=4), KeyValue(1, 16, 16), State(((4, 3),))]
    layers = [*own, SharedWith(0), SharedWith(1)]
    assert windows_of(layers) == windows_of(own) == (4,)
    chunks = [KeyValue(2, 8, 8, window) for window in (Chunk(4), 9, Chunk(3), 4)]
    assert windows_of([*layers, *chunks]) == (4, 9, Chunk(3), Chunk(4))
    assert bytes_per_token([*layers, *chunks], element_size=2, window=Chunk(4)) == 2 * 2 * 16
    assert without_windows(chunks) == (KeyValue(2, 8, 8),) * 4
    assert [bytes_per_token(layers, 2, window) for window in (None, 4)] == [2 * 32, 2 * 32]
    assert bytes_per_state(layers) == bytes_per_state(own)
    assert without_windows(layers) == (KeyValue(2, 8, 8), *layers[1:])
