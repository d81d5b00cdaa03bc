"""The host pool of a GPU's KV cache, with stubs of CUDA that record what is locked."""

from __future__ import annotations

import gc

import pytest
import torch

from engine.errors import ConfigError
from engine.kv import page_memory
from engine.kv.kv_cache import KVCache
from engine.kv.layer_cache import KeyValue
from engine.kv.page_memory import PageMemory
from engine.kv.pinned_memory import pinned_zeros, unpin
from engine.kv.pool_sizes import PoolSizes
from engine.kv.shared_host import HostShare

GPU = torch.device("cuda", 0)


class Cudart:
    """The functions of torch.cuda.cudart() for page-locked memory."""

    def __init__(self) -> None:
        self.error = 0
        self.locked: dict[int, int] = {}  # bytes by address

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        if not self.error:
            self.locked[pointer] = size
        return self.error

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        del self.locked[pointer]
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return {2: "out of memory"}[error]


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    stub = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stub)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(page_memory, "_zeros", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype))
    return stub


def make_cache(num_host_blocks: int) -> KVCache:
    layers = [KeyValue(heads=2, key_dim=32, value_dim=32)] * 3
    sizes = PoolSizes(2, num_host_blocks=num_host_blocks)
    return KVCache(layers, sizes, block_size=16, dtype=torch.bfloat16, device=GPU)


def test_the_host_pool_locks_its_own_size_and_not_the_next_power_of_two(cudart: Cudart) -> None:
    cache = make_cache(num_host_blocks=900)  # 10.5 MiB
    assert list(cudart.locked.values()) == [cache.blocks.num_host_bytes]
    assert list(cudart.locked) == [cache.blocks._host.data_ptr()]
    assert cache.blocks._host_words[0].data_ptr() == cache.blocks._host.data_ptr()


def test_the_memory_is_unlocked_with_the_cache(cudart: Cudart) -> None:
    cache = make_cache(num_host_blocks=900)
    del cache
    gc.collect()
    assert not cudart.locked


def test_a_cache_without_a_host_pool_locks_nothing(cudart: Cudart) -> None:
    cache = make_cache(num_host_blocks=0)
    assert not cudart.locked
    assert cache.blocks.num_host_bytes == 0


@pytest.mark.parametrize("share", [None, HostShare("/dev/null", num_ranks=2)])
def test_pages_without_bytes_lock_nothing(cudart: Cudart, share: HostShare | None) -> None:
    """The blocks of a model whose layers all have windows, or states, hold nothing themselves."""
    memory = PageMemory("KV block", [], num_pages=4, dtype=torch.bfloat16, device=GPU, num_host_pages=8, share=share)
    assert not cudart.locked
    assert memory.num_host_bytes == 0
    assert memory.host_bytes.nbytes == 0
    del memory
    gc.collect()  # unlocks nothing


def test_memory_that_cannot_be_locked_is_an_error_that_names_the_option(cudart: Cudart) -> None:
    cudart.error = 2
    message = r"900 swapped KV blocks .* 0\.01 GiB, .* lower swap_space_gib \(cudaHostRegister: out of memory\)"
    with pytest.raises(ConfigError, match=message):
        make_cache(num_host_blocks=900)
    assert not cudart.locked


@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), (1 << 20, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_tensor_is_zero_and_lies_on_pages_of_its_own(
    cudart: Cudart, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = pinned_zeros(shape, dtype)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert not tensor.any()
    ((pointer, size),) = cudart.locked.items()
    assert pointer == tensor.data_ptr()
    assert pointer % 4096 == 0
    assert size >= max(tensor.nbytes, 4096)
    unpin(tensor, GPU)
    assert not cudart.locked


def test_after_a_failed_kernel_the_memory_is_unlocked_all_the_same(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = pinned_zeros((4,), torch.float32)

    def fail(device: torch.device) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered", 700)

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    unpin(tensor, GPU)
    assert not cudart.locked


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_torch_takes_the_memory_for_pinned() -> None:
    tensor = pinned_zeros((1000,), torch.float32)
    try:
        assert tensor.is_pinned()
        on_gpu = torch.arange(1000, device="cuda", dtype=torch.float32)
        tensor.copy_(on_gpu, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(tensor, on_gpu.cpu())
    finally:
        unpin(tensor, GPU)
