"""Blocks have their memory before they are used, a bounded number of them, and their contents stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.kv import page_memory
from engine.kv.kv_cache import KVCache
from engine.kv.layer_cache import IndexKey, KeyValue, Latent, State
from engine.kv.page_copies import PageCopies
from engine.kv.page_memory import PageMemory
from engine.kv.pool_sizes import PoolSizes
from kernels.cpu.library import library
from kernels.cpu.memory import huge_zeros
from kernels.cpu.prefaulter import Prefaulter
from tests.kernels.cpu.test_memory import num_resident_bytes
from tests.waiting import until

ROOT = Path(__file__).parents[3]
BLOCK = 64 * 2**10
HOST_BYTES_AHEAD = 4 * 2**20
HUGE_BLOCKS = 2 * 2**20 // BLOCK  # which a huge page may allocate in addition


def impolite(parts: list[torch.Tensor], num_ahead: int) -> Prefaulter:
    """Return a prefaulter that other tests on this machine cannot delay."""
    return Prefaulter(parts, num_ahead, is_polite=False)


@pytest.fixture
def quick_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches have their memory soon, however many other programs run: little of it, from a thread of usual priority."""
    monkeypatch.setattr(page_memory, "Prefaulter", impolite)
    monkeypatch.setattr(page_memory, "_HOST_BYTES_AHEAD", HOST_BYTES_AHEAD)


def can_prefault() -> bool:
    """Return whether this system allocates memory beforehand, as Linux does from 5.14 on; else all blocks are ready."""
    if library() is None:
        return False
    prefaulter = impolite([torch.zeros(1000, 4096)], 0)
    prefaulter.use(7)
    until(lambda: prefaulter.num_ready, "a block is ready", pause_s=0.001)
    return prefaulter.num_ready == 8


@pytest.fixture
def parts() -> list[torch.Tensor]:
    return [huge_zeros((1000, BLOCK), torch.uint8) for _ in range(2)]


def wait(prefaulter: Prefaulter, num_ready: int) -> None:
    """Wait until exactly as many blocks are ready."""
    until(lambda: prefaulter.num_ready == num_ready, f"{num_ready} blocks are ready", pause_s=0.005)


pytestmark = pytest.mark.skipif(
    not can_prefault(), reason="needs the CPU kernels, and a system that allocates memory beforehand"
)


def num_resident_blocks(part: torch.Tensor) -> int:
    return num_resident_bytes(part) // BLOCK


def test_blocks_ahead_are_ready_and_no_more(parts: list[torch.Tensor]) -> None:
    prefaulter = impolite(parts, 100)
    assert prefaulter.num_ready == 0
    prefaulter.use(0)
    wait(prefaulter, 101)
    for part in parts:
        assert 101 <= num_resident_blocks(part) <= 101 + HUGE_BLOCKS


def test_it_goes_on_with_every_few_blocks(parts: list[torch.Tensor]) -> None:
    prefaulter = impolite(parts, 100)
    for used, num_ready in ((0, 101), (2, 101), (7, 101), (8, 109), (30, 131), (20, 131), (-1, 131), (60, 161)):
        prefaulter.use(used)
        wait(prefaulter, num_ready)
    for part in parts:
        assert 161 <= num_resident_blocks(part) <= 161 + HUGE_BLOCKS


def test_it_ends_with_the_pool(parts: list[torch.Tensor]) -> None:
    prefaulter = impolite(parts, 100)
    for used, num_ready in ((885, 986), (3, 986), (899, 1000), (999, 1000), (0, 1000)):
        prefaulter.use(used)
        wait(prefaulter, num_ready)
    for part in parts:
        assert num_resident_blocks(part) == 1000


def test_a_polite_prefaulter_finishes_too(parts: list[torch.Tensor]) -> None:
    prefaulter = Prefaulter(parts, 10)
    prefaulter.use(0)
    wait(prefaulter, 11)


def test_contents_written_meanwhile_stay(parts: list[torch.Tensor]) -> None:
    prefaulter = impolite(parts, 1000)
    prefaulter.use(0)
    for block_id in range(1000):
        for part in parts:
            part[block_id] = block_id % 251
    wait(prefaulter, 1000)
    expected = (torch.arange(1000) % 251).to(torch.uint8)[:, None]
    for part in parts:
        assert bool((part == expected).all())


def test_calls_while_it_works_are_not_lost() -> None:
    """A call may come at any point of the thread's work, at its end too."""
    for round_number in range(200):
        prefaulter = impolite([torch.zeros(4000, 64) for _ in range(2)], 8)
        for block_id in range(0, 3000, 8 + round_number % 7):
            prefaulter.use(block_id)
        prefaulter.use(3991)
        wait(prefaulter, 4000)


def test_memory_may_be_freed_while_it_works() -> None:
    for _ in range(20):
        parts = [huge_zeros((1000, BLOCK), torch.uint8) for _ in range(2)]
        prefaulter = impolite(parts, 1000)
        prefaulter.use(0)
        del prefaulter, parts
    assert int(huge_zeros((100, BLOCK), torch.uint8).sum()) == 0


def test_memory_that_cannot_be_allocated_is_not_requested_again() -> None:
    class Nowhere(torch.Tensor):
        def data_ptr(self) -> int:
            return 4096  # which no program may use

    prefaulter = impolite([torch.zeros(1000, 4096).as_subclass(Nowhere)], 10)
    prefaulter.use(0)
    wait(prefaulter, 1000)


def test_a_program_may_end_while_it_works() -> None:
    program = """
import torch
from kernels.cpu.prefaulter import Prefaulter
from kernels.cpu.memory import huge_zeros
prefaulter = Prefaulter([huge_zeros((32_000, 2**16), torch.uint8)], num_ahead=32_000)
prefaulter.use(0)
print(prefaulter.num_ready < 32_000)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "True\n")


def prefaulter_of(pool: PageMemory) -> Prefaulter:
    assert pool._prefaulter is not None
    return pool._prefaulter


@pytest.mark.usefixtures("quick_caches")
def test_a_cache_is_ready_for_the_first_step_and_for_expected_slots() -> None:
    cache = KVCache(
        [KeyValue(heads=2, key_dim=128, value_dim=128)] * 2,
        PoolSizes(1000),
        block_size=16,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        num_blocks_ahead=64,
    )
    wait(prefaulter_of(cache.blocks), 65)
    for layer in cache.layers:
        for part in layer:
            assert num_resident_bytes(part[:65]) >= part[:65].nbytes
    cache.expect(np.array([3, 500 * 16 + 5, -1]))
    wait(prefaulter_of(cache.blocks), 565)
    assert num_resident_bytes(cache.layers[1][1][:565]) >= cache.layers[1][1][:565].nbytes


@pytest.mark.usefixtures("quick_caches")
def test_blocks_whose_parts_differ_in_size_are_ready() -> None:
    """Latents are wider than the keys of an indexer, whose memory ends sooner."""
    for layers in ([Latent(512, 64), IndexKey(128)], [IndexKey(128), Latent(512, 64)]):
        cache = KVCache(
            layers,
            PoolSizes(100),
            block_size=64,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            num_blocks_ahead=30,
        )
        wait(prefaulter_of(cache.blocks), 31)
        for used, num_ready in ((60, 91), (99, 100)):
            cache.expect(np.array([used * 64]))
            wait(prefaulter_of(cache.blocks), num_ready)
            for (part,) in cache.layers:
                assert num_resident_bytes(part[:num_ready]) >= part[:num_ready].nbytes


@pytest.mark.usefixtures("quick_caches")
def test_pages_of_windows_and_slots_of_states_are_ready() -> None:
    """A slot is used by a sequence, by the snapshot of a prefill, or as the target of a copy."""
    cache = KVCache(
        [KeyValue(heads=2, key_dim=128, value_dim=128, window=512), State(((3, 4096), (8, 128, 128)))],
        PoolSizes(1000, num_window_pages=(1000,), num_slots=40),
        block_size=16,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        num_blocks_ahead=64,
    )
    (window,) = cache.windows.values()
    wait(prefaulter_of(window), 65)
    cache.expect(np.array([999 * 16]), [np.array([500 * 16 + 5, -1])])
    wait(prefaulter_of(window), 565)
    slots = prefaulter_of(cache.slots)
    wait(slots, 5)
    cache.expect_slots(np.array([2, 9, -1], dtype=np.int32))
    wait(slots, 14)
    cache.slots.make(PageCopies([], [], [(9, 20)]))
    wait(slots, 25)
    for part in cache.layers[1]:
        assert num_resident_bytes(part[:25]) >= part[:25].nbytes


@pytest.mark.usefixtures("quick_caches")
def test_a_host_pool_is_ready_for_the_first_pages_and_for_expected_ones() -> None:
    cache = KVCache(
        [KeyValue(heads=8, key_dim=128, value_dim=128)] * 2,
        PoolSizes(10, num_host_blocks=3000),
        block_size=16,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        num_blocks_ahead=1,
    )
    pool, ahead = cache.blocks, HOST_BYTES_AHEAD // cache.blocks.bytes_per_page
    assert pool._host_prefaulter is not None
    wait(pool._host_prefaulter, ahead + 1)
    cache.host_memory.expect(0, 30)
    wait(pool._host_prefaulter, ahead + 31)
    pool.swap_out([(0, 60)])
    wait(pool._host_prefaulter, ahead + 61)
    ready = pool._host[: ahead + 61]
    assert num_resident_bytes(ready) >= ready.nbytes
    assert num_resident_bytes(pool._host[ahead + 100 :]) == 0


def test_a_cache_prefaults_nothing_by_default() -> None:
    cache = KVCache(
        [KeyValue(heads=8, key_dim=128, value_dim=128)] * 1,
        PoolSizes(1000),
        block_size=16,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    cache.expect(np.array([999 * 16]))
    assert num_resident_bytes(cache.layers[0][0]) == 0
