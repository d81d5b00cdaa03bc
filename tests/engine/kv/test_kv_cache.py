"""The KV cache against a dictionary of blocks: whatever is moved, every bit arrives and no other changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError, KVCacheError
from engine.kv.kv_cache import KVCache
from engine.kv.layer_cache import KeyValue, Latent, LayerCache, SharedWith, State, TokenCache, in_dtype
from engine.kv.pool_sizes import PageSizes, PoolSizes
from kernels.cache.fp8 import FP8

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
LAYERS, BLOCKS, HOST_BLOCKS = 3, 6, 4
CPU = torch.device("cpu")
Pairs = list[tuple[int, int]]
DECLARATIONS = [  # whose blocks are copied as integers of each width
    [KeyValue(heads=1, key_dim=1, value_dim=1)],
    [KeyValue(heads=2, key_dim=3, value_dim=3)] * 3,
    [KeyValue(heads=2, key_dim=8, value_dim=8)] * 2,
    [KeyValue(heads=2, key_dim=8, value_dim=4)] * 3,
    [KeyValue(heads=1, key_dim=3, value_dim=2), KeyValue(heads=2, key_dim=2, value_dim=3)],
    [Latent(rank=5, rope_dim=2)] * 3,
    [Latent(rank=6, rope_dim=2), KeyValue(heads=2, key_dim=4, value_dim=4), Latent(rank=6, rope_dim=2)],
    [KeyValue(heads=2, key_dim=3, value_dim=3, dtype="fp8")] * 3,
    [KeyValue(heads=2, key_dim=8, value_dim=4, dtype="fp8")] * 2,
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the raw bits, so that a NaN equals itself and 0.0 differs from -0.0."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def make_cache(
    dtype: torch.dtype = torch.float32,
    *,
    block_size: int = 2,
    layers: Sequence[TokenCache] = (KeyValue(heads=2, key_dim=3, value_dim=3),) * LAYERS,
    host: int = 0,
    device: str = "cpu",
) -> KVCache:
    sizes = PoolSizes(BLOCKS, num_host_blocks=host)
    return KVCache(layers, sizes, block_size=block_size, dtype=dtype, device=torch.device(device))


class ReferenceCache:
    """Two dictionaries, block -> the bits of what each layer caches, and nothing clever."""

    def __init__(self, cache: KVCache, seed: int) -> None:
        self.cache = cache
        self.generator = torch.Generator().manual_seed(seed)
        self.device: dict[int, list[tuple[torch.Tensor, ...]]] = {}
        self.host: dict[int, list[tuple[torch.Tensor, ...]]] = {}
        for block_id in range(cache.blocks.num_pages):
            self.write(block_id)
        cache.blocks.swap_out([(0, host_id) for host_id in range(cache.blocks.num_host_pages)])
        self.host = dict.fromkeys(range(cache.blocks.num_host_pages), self.device[0])

    def write(self, block_id: int) -> None:
        """Store random bits through the layers' views, as attention does; every third is a NaN with a payload."""
        for part in (part for layer in self.cache.layers for part in layer):
            tensor = bits(part)
            top = torch.iinfo(tensor.dtype)
            random = torch.randint(top.min, top.max, tensor[block_id].shape, generator=self.generator)
            tensor[block_id] = random.to(tensor.dtype)
            nan = torch.full((), float("nan"), dtype=part.dtype)
            tensor[block_id].view(-1)[::3] = bits(nan) | 5
        self.device[block_id] = [
            tuple(bits(part)[block_id].to("cpu", copy=True) for part in layer) for layer in self.cache.layers
        ]

    def move(self, operation: str, pairs: Pairs) -> None:
        source, target = {
            "copy": (self.device, self.device),
            "swap_out": (self.device, self.host),
            "swap_in": (self.host, self.device),
        }[operation]
        held = {target_id: source[source_id] for source_id, target_id in pairs}  # all read before any is written
        target |= held

    def check(self) -> None:
        """Compare every block of the device pool; the host pool shows itself when it is swapped in."""
        for block_id, expected in self.device.items():
            for layer, expected_parts in zip(self.cache.layers, expected, strict=True):
                for part, expected_bits in zip(layer, expected_parts, strict=True):
                    assert torch.equal(bits(part)[block_id].cpu(), expected_bits)


def pairs_between(sources: int, targets: int) -> st.SearchStrategy[Pairs]:
    pair = st.tuples(st.integers(0, sources - 1), st.integers(0, targets - 1))
    return st.lists(pair, max_size=4, unique_by=lambda item: item[1])


OPERATIONS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, BLOCKS - 1)),
    st.tuples(st.just("copy"), pairs_between(BLOCKS, BLOCKS)),
    st.tuples(st.just("swap_out"), pairs_between(BLOCKS, HOST_BLOCKS)),
    st.tuples(st.just("swap_in"), pairs_between(HOST_BLOCKS, BLOCKS)),
)


@settings(max_examples=150, deadline=None)
@given(
    device=st.sampled_from(DEVICES),
    dtype=st.sampled_from(DTYPES),
    block_size=st.sampled_from([1, 2, 4]),
    layers=st.sampled_from(DECLARATIONS),
    operations=st.lists(OPERATIONS, max_size=12),
    seed=st.integers(0, 99),
)
def test_random_copies_and_swaps_preserve_content(
    device: str,
    dtype: torch.dtype,
    block_size: int,
    layers: list[TokenCache],
    operations: list[tuple[str, int | Pairs]],
    seed: int,
) -> None:
    cache = make_cache(dtype, block_size=block_size, layers=layers, host=HOST_BLOCKS, device=device)
    reference = ReferenceCache(cache, seed)
    for operation, argument in operations:
        if isinstance(argument, int):
            reference.write(argument)
        else:
            getattr(cache.blocks, operation)(argument)
            reference.move(operation, argument)
        reference.check()
    everything = [(host_id, host_id) for host_id in range(HOST_BLOCKS)]
    cache.blocks.swap_in(everything)
    reference.move("swap_in", everything)
    reference.check()


def test_a_chain_and_a_cycle_of_copies_read_before_they_write() -> None:
    cache = make_cache()
    reference = ReferenceCache(cache, seed=1)
    before = dict(reference.device)
    cache.blocks.copy([(0, 1), (1, 2), (2, 0), (2, 3)])
    for target, source in {1: 0, 2: 1, 0: 2, 3: 2, 4: 4, 5: 5}.items():
        assert torch.equal(bits(cache.layers[1][0])[target], before[source][1][0])


def test_layers_are_views_that_attention_writes_through() -> None:
    cache = make_cache()
    assert len(cache.layers) == LAYERS
    for layer, (key, value) in enumerate(cache.layers):
        assert key.shape == value.shape == (BLOCKS, 2, 2, 3)
        assert key.is_contiguous()
        assert value.is_contiguous()
        key.fill_(layer)
        value.fill_(-layer)
    assert [key.unique().tolist() for key, _ in cache.layers] == [[0], [1], [2]]
    assert [value.unique().tolist() for _, value in cache.layers] == [[0], [-1], [-2]]


def test_layers_have_the_shapes_that_they_declare() -> None:
    cache = make_cache(layers=[KeyValue(heads=2, key_dim=4, value_dim=3), KeyValue(heads=1, key_dim=3, value_dim=6)])
    assert [[part.shape[2:] for part in layer] for layer in cache.layers] == [[(2, 4), (2, 3)], [(1, 3), (1, 6)]]
    assert all(part.is_contiguous() and part.shape[:2] == (BLOCKS, 2) for layer in cache.layers for part in layer)


def test_layers_in_fp8_take_a_byte_a_number_beside_others_and_states() -> None:
    fp8 = in_dtype([KeyValue(2, 4, 4), State(((3,),)), KeyValue(2, 4, 4, window=8)], "fp8")
    layers = [KeyValue(2, 4, 4), *fp8[1:]]  # of pools that differ
    sizes = PoolSizes(BLOCKS, num_window_pages=(3,), num_slots=2)
    cache = KVCache(layers, sizes, block_size=2, dtype=torch.bfloat16, device=CPU)
    assert [layer[0].dtype for layer in cache.layers] == [torch.bfloat16, torch.float32, FP8]
    assert [pool.bytes_per_page for pool in cache.pools] == [2 * 16 * 2, 2 * 16, 12]
    page_sizes = PageSizes.of(layers, block_size=2, element_size=2)
    assert [page_sizes.block, *(size for _, size in page_sizes.windows), page_sizes.slot] == [64, 32, 12]


def test_a_layer_with_latents_has_one_tensor_of_them() -> None:
    cache = make_cache(layers=[Latent(rank=6, rope_dim=2), KeyValue(heads=1, key_dim=3, value_dim=3)])
    assert [[tuple(part.shape) for part in layer] for layer in cache.layers] == [
        [(BLOCKS, 2, 8)],
        [(BLOCKS, 2, 1, 3)] * 2,
    ]
    assert cache.layers[0][0].is_contiguous()


@pytest.mark.parametrize(
    ("layers", "elements_per_token"),
    [
        ([KeyValue(heads=2, key_dim=3, value_dim=3)] * LAYERS, LAYERS * 2 * 2 * 3),
        ([KeyValue(heads=2, key_dim=4, value_dim=3), KeyValue(heads=1, key_dim=3, value_dim=6)], 2 * 7 + 9),
        ([Latent(rank=6, rope_dim=3), KeyValue(heads=2, key_dim=4, value_dim=3)], 9 + 2 * 7),
    ],
)
def test_sizes_say_what_the_tensors_take(layers: list[TokenCache], elements_per_token: int) -> None:
    cache = make_cache(torch.bfloat16, layers=layers, host=4)
    assert cache.blocks.bytes_per_page == elements_per_token * 2 * 2
    assert cache.num_bytes == sum(tensor.nbytes for layer in cache.layers for tensor in layer)
    assert cache.blocks.num_host_bytes == 4 * cache.blocks.bytes_per_page
    assert cache.num_tokens == BLOCKS * 2


@pytest.mark.parametrize(
    ("operation", "argument", "message"),
    [
        ("copy", [(0, 1), (6, 2)], "block 6 is out of range; valid are 0 to 5"),
        ("copy", [(0, -1)], "block -1 is out of range; valid are 0 to 5"),
        ("copy", [(0, 2), (1, 2)], "block 2 is written twice"),
        ("swap_out", [(0, 4)], "host block 4 is out of range; valid are 0 to 3"),
        ("swap_out", [(6, 0)], "block 6 is out of range"),
        ("swap_out", [(0, 1), (2, 1)], "host block 1 is written twice"),
        ("swap_in", [(4, 0)], "host block 4 is out of range"),
        ("swap_in", [(0, 6)], "block 6 is out of range"),
        ("swap_in", [(0, 3), (1, 3)], "block 3 is written twice"),
    ],
)
def test_a_move_of_what_does_not_exist_names_it_and_moves_nothing(
    operation: str, argument: Pairs, message: str
) -> None:
    cache = make_cache(host=HOST_BLOCKS)
    reference = ReferenceCache(cache, seed=2)
    with pytest.raises(KVCacheError, match=message):
        getattr(cache.blocks, operation)(argument)
    reference.check()


def test_without_a_host_pool_nothing_can_be_swapped() -> None:
    cache = make_cache()
    cache.blocks.swap_out([])
    cache.blocks.swap_in([])
    with pytest.raises(KVCacheError, match="host block 0 is out of range; valid are none: the pool is empty"):
        cache.blocks.swap_out([(0, 0)])


@pytest.mark.parametrize(("blocks", "host", "remedy"), [(2**40, 0, "lower num_blocks"), (1, 2**40, "swap_space_gib")])
def test_a_pool_larger_than_memory_is_an_error_that_says_what_to_lower(blocks: int, host: int, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"take .* GiB, which cannot be allocated; .*{remedy}"):
        KVCache(
            [KeyValue(heads=2, key_dim=64, value_dim=64)] * 2,
            PoolSizes(blocks, num_host_blocks=host),
            block_size=16,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )


def test_windows_and_states_have_pools_of_their_own() -> None:
    layers = [
        KeyValue(heads=2, key_dim=4, value_dim=4),
        State(((3, 2), (5,))),
        KeyValue(heads=2, key_dim=4, value_dim=4, window=8),
        State(((3, 2),)),
    ]
    sizes = PoolSizes(BLOCKS, num_window_pages=(3,), num_slots=2)
    cache = KVCache(layers, sizes, block_size=2, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert [[tuple(part.shape) for part in layer] for layer in cache.layers] == [
        [(BLOCKS, 2, 2, 4)] * 2,
        [(2, 3, 2), (2, 5)],
        [(3, 2, 2, 4)] * 2,
        [(2, 3, 2)],
    ]
    assert [part.dtype for part in cache.layers[1]] == [torch.float32] * 2
    assert [pool.num_pages for pool in cache.pools] == [BLOCKS, 3, 2]
    assert cache.num_bytes == PageSizes.of(layers, 2, 2).num_bytes(sizes) == BLOCKS * 64 + 3 * 64 + 2 * 17 * 4
    cache.layers[1][0][0], cache.layers[3][0][0] = 1.0, 2.0
    cache.slots.copy([(0, 1)])
    assert cache.layers[1][0][1].unique().tolist() == [1.0]
    assert cache.layers[3][0][1].unique().tolist() == [2.0]
    assert cache.layers[1][1].unique().tolist() == [0.0]


def test_layers_that_share_have_the_tensors_of_others() -> None:
    """As in Gemma 4: two sizes of heads, and the last layers read those of the last earlier one of their type."""
    own: list[LayerCache] = [
        KeyValue(heads=2, key_dim=4, value_dim=4, window=8),
        KeyValue(heads=1, key_dim=8, value_dim=6),
        KeyValue(heads=2, key_dim=4, value_dim=4, window=8),
    ]
    layers, sizes = [*own, SharedWith(2), SharedWith(1)], PoolSizes(BLOCKS, num_window_pages=(3,))
    cache = KVCache(layers, sizes, block_size=2, dtype=torch.float32, device=CPU)
    assert cache.num_bytes == PageSizes.of(layers, 2, 4).num_bytes(sizes) == PageSizes.of(own, 2, 4).num_bytes(sizes)
    assert [[tuple(part.shape) for part in layer] for layer in cache.layers[3:]] == [
        [(3, 2, 2, 4)] * 2,
        [(BLOCKS, 2, 1, 8), (BLOCKS, 2, 1, 6)],
    ]
    for index, (keys, values) in enumerate(cache.layers[:3]):
        keys.fill_(index)
        values.fill_(-index)
    assert [[part.unique().tolist() for part in layer] for layer in cache.layers[3:]] == [[[2], [-2]], [[1], [-1]]]


def test_a_model_without_full_attention_has_blocks_that_take_no_memory() -> None:
    cache = KVCache([State(((4,),))], PoolSizes(9, num_slots=3), block_size=2, dtype=torch.float32, device=CPU)
    assert (cache.num_bytes, cache.num_tokens, cache.blocks.parts) == (3 * 16, 18, [])
    cache.blocks.copy([(0, 8)])
    with pytest.raises(KVCacheError, match="slot 3 is out of range; valid are 0 to 2"):
        cache.slots.copy([(3, 0)])


def test_a_cpu_copies_pages_without_waiting_for_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's copies are made by all threads. Where other programs have the cores, one takes 50 times as long."""
    cache = make_cache(host=HOST_BLOCKS, layers=[KeyValue(heads=64, key_dim=64, value_dim=64)] * 2, block_size=16)
    for part in cache.blocks.parts:
        part[1] = torch.randn(part[1].shape)

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("torch copies")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", refuse)
        cache.blocks.swap_out([(1, 2)])
        cache.blocks.swap_in([(2, 3)])
        cache.blocks.copy([(3, 4)])
    for part in cache.blocks.parts:
        assert torch.equal(part[1], part[4])
