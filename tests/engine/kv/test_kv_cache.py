"""The KV cache against a dictionary of blocks: whatever is moved, every bit arrives and no other changes."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError, KVCacheError
from engine.kv.kv_cache import KVCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
LAYERS, BLOCKS, HOST_BLOCKS = 3, 6, 4
Pairs = list[tuple[int, int]]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the raw bits, so that a NaN equals itself and 0.0 differs from -0.0."""
    return tensor.view(torch.int32 if tensor.dtype.itemsize == 4 else torch.int16)


def make_cache(
    dtype: torch.dtype = torch.float32,
    *,
    block_size: int = 2,
    head_dim: int = 3,
    host: int = 0,
    device: str = "cpu",
) -> KVCache:
    return KVCache(
        num_layers=LAYERS,
        num_blocks=BLOCKS,
        block_size=block_size,
        num_kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device(device),
        num_host_blocks=host,
    )


class ReferenceCache:
    """Two dictionaries, block -> bits ``[num_layers, 2, block_size, heads, dim]``, and nothing clever."""

    def __init__(self, cache: KVCache, seed: int) -> None:
        self.cache = cache
        self.generator = torch.Generator().manual_seed(seed)
        self.device: dict[int, torch.Tensor] = {}
        self.host: dict[int, torch.Tensor] = {}
        for block_id in range(cache.num_blocks):
            self.write(block_id)
        cache.swap_out([(0, host_id) for host_id in range(cache.num_host_blocks)])
        self.host = dict.fromkeys(range(cache.num_host_blocks), self.device[0])

    def write(self, block_id: int) -> None:
        """Store random bits through the layers' views, as attention does; every third is a NaN with a payload."""
        for key, value in self.cache.layers:
            for tensor in (bits(key), bits(value)):
                top = torch.iinfo(tensor.dtype)
                random = torch.randint(top.min, top.max, tensor[block_id].shape, generator=self.generator)
                tensor[block_id] = random.to(tensor.dtype)
                infinity = torch.full((), float("inf"), dtype=key.dtype)
                tensor[block_id].view(-1)[::3] = bits(infinity) | 5
        stored = [torch.stack([bits(key)[block_id], bits(value)[block_id]]) for key, value in self.cache.layers]
        self.device[block_id] = torch.stack(stored).to("cpu", copy=True)

    def move(self, operation: str, pairs: Pairs) -> None:
        source, target = {
            "copy_blocks": (self.device, self.device),
            "swap_out": (self.device, self.host),
            "swap_in": (self.host, self.device),
        }[operation]
        held = {target_id: source[source_id] for source_id, target_id in pairs}  # all read before any is written
        target |= held

    def check(self) -> None:
        """Compare every block of the device pool; the host pool shows itself when it is swapped in."""
        for block_id, expected in self.device.items():
            for layer, (key, value) in enumerate(self.cache.layers):
                assert torch.equal(bits(key)[block_id].cpu(), expected[layer, 0])
                assert torch.equal(bits(value)[block_id].cpu(), expected[layer, 1])


def pairs_between(sources: int, targets: int) -> st.SearchStrategy[Pairs]:
    pair = st.tuples(st.integers(0, sources - 1), st.integers(0, targets - 1))
    return st.lists(pair, max_size=4, unique_by=lambda item: item[1])


OPERATIONS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, BLOCKS - 1)),
    st.tuples(st.just("copy_blocks"), pairs_between(BLOCKS, BLOCKS)),
    st.tuples(st.just("swap_out"), pairs_between(BLOCKS, HOST_BLOCKS)),
    st.tuples(st.just("swap_in"), pairs_between(HOST_BLOCKS, BLOCKS)),
)


@settings(max_examples=150, deadline=None)
@given(
    device=st.sampled_from(DEVICES),
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(1, 1), (2, 3), (4, 8)]),  # so that every width of integer gets its turn
    operations=st.lists(OPERATIONS, max_size=12),
    seed=st.integers(0, 99),
)
def test_random_copies_and_swaps_preserve_content(
    device: str, dtype: torch.dtype, shape: tuple[int, int], operations: list[tuple[str, int | Pairs]], seed: int
) -> None:
    cache = make_cache(dtype, block_size=shape[0], head_dim=shape[1], host=HOST_BLOCKS, device=device)
    reference = ReferenceCache(cache, seed)
    for operation, argument in operations:
        if isinstance(argument, int):
            reference.write(argument)
        else:
            getattr(cache, operation)(argument)
            reference.move(operation, argument)
        reference.check()
    everything = [(host_id, host_id) for host_id in range(HOST_BLOCKS)]
    cache.swap_in(everything)
    reference.move("swap_in", everything)
    reference.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["key", "value"])
def test_gather_copies_the_blocks_in_the_order_asked_for(
    dtype: torch.dtype, which: Literal["key", "value"], device: str
) -> None:
    cache = make_cache(dtype, device=device)
    reference = ReferenceCache(cache, seed=0)
    part = ("key", "value").index(which)
    gathered = cache.gather([4, 1, 4], which=which)
    assert gathered.shape == (LAYERS, 6, 2, 3)
    for layer in range(LAYERS):
        expected = torch.cat([reference.device[block_id][layer, part] for block_id in (4, 1, 4)])
        assert torch.equal(bits(gathered[layer]).cpu(), expected)
        one_layer = cache.gather([4, 1, 4], layer, which=which)
        assert one_layer.shape == (6, 2, 3)
        assert torch.equal(bits(one_layer).cpu(), expected)
        one_layer.zero_()
    gathered.zero_()
    reference.check()  # it was a copy
    assert cache.gather([], which=which).shape == (LAYERS, 0, 2, 3)


def test_a_chain_and_a_cycle_of_copies_read_before_they_write() -> None:
    cache = make_cache()
    reference = ReferenceCache(cache, seed=1)
    before = dict(reference.device)
    cache.copy_blocks([(0, 1), (1, 2), (2, 0), (2, 3)])
    for target, source in {1: 0, 2: 1, 0: 2, 3: 2, 4: 4, 5: 5}.items():
        assert torch.equal(bits(cache.layers[1][0])[target], before[source][1, 0])


def test_layers_are_views_that_attention_writes_through() -> None:
    cache = make_cache()
    assert len(cache.layers) == LAYERS
    for layer, (key, value) in enumerate(cache.layers):
        assert key.shape == value.shape == (BLOCKS, 2, 2, 3)
        assert key.is_contiguous()
        assert value.is_contiguous()
        key.fill_(layer)
        value.fill_(-layer)
    assert cache.gather([5], which="key")[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert cache.gather([5], 2, which="value").unique().tolist() == [-2]


def test_sizes_say_what_the_tensors_take() -> None:
    cache = make_cache(torch.bfloat16, host=4)
    assert cache.bytes_per_block == LAYERS * 2 * 2 * 2 * 3 * 2
    assert cache.num_bytes == sum(tensor.nbytes for layer in cache.layers for tensor in layer)
    assert cache.num_host_bytes == 4 * cache.bytes_per_block
    assert cache.num_tokens == BLOCKS * 2


@pytest.mark.parametrize(
    ("operation", "argument", "message"),
    [
        ("copy_blocks", [(0, 1), (6, 2)], "block 6 is out of range; valid are 0 to 5"),
        ("copy_blocks", [(0, -1)], "block -1 is out of range; valid are 0 to 5"),
        ("copy_blocks", [(0, 2), (1, 2)], "block 2 is written twice"),
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
        getattr(cache, operation)(argument)
    reference.check()


def test_gather_names_what_does_not_exist() -> None:
    cache = make_cache()
    with pytest.raises(KVCacheError, match="block 6 is out of range; valid are 0 to 5"):
        cache.gather([0, 6], which="key")
    with pytest.raises(KVCacheError, match="layer -1 is out of range; valid are 0 to 2"):
        cache.gather([0], -1, which="key")
    with pytest.raises(KVCacheError, match="which='k' is not a part of the KV cache; choose 'key' or 'value'"):
        cache.gather([0], which="k")  # type: ignore[arg-type]


def test_without_a_host_pool_nothing_can_be_swapped() -> None:
    cache = make_cache()
    cache.swap_out([])
    cache.swap_in([])
    with pytest.raises(KVCacheError, match="host block 0 is out of range; valid are none: the pool is empty"):
        cache.swap_out([(0, 0)])


@pytest.mark.parametrize(("blocks", "host", "remedy"), [(2**40, 0, "lower num_blocks"), (1, 2**40, "swap_space_gib")])
def test_a_pool_larger_than_memory_is_an_error_that_says_what_to_lower(blocks: int, host: int, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"take .* GiB, which cannot be allocated; .*{remedy}"):
        KVCache(
            num_layers=2,
            num_blocks=blocks,
            block_size=16,
            num_kv_heads=2,
            head_dim=64,
            dtype=torch.float32,
            device=torch.device("cpu"),
            num_host_blocks=host,
        )
