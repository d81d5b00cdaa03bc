"""How many blocks fit, what is said about it, and the errors when none do."""

from __future__ import annotations

import logging
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.pool_sizes import PageSizes, PoolSizes
from engine.worker import memory
from engine.worker.memory import (
    available_host_memory,
    blocks_that_fit,
    gpu_memory_for_cache,
    host_memory_for_cache,
    host_pools_for,
)
from engine.worker.model_runner import ModelRunner
from kernels import cgroup
from tests.engine.conftest import SavedModel


def test_blocks_that_fit_are_at_most_the_useful_ones() -> None:
    assert blocks_that_fit(1000, 100, max_useful=50) == 10
    assert blocks_that_fit(1000, 100, max_useful=3) == 3


def test_the_error_says_what_is_left_and_what_a_block_takes() -> None:
    with pytest.raises(ConfigError, match=r"3\.0 MiB are left for the KV cache, but one block takes 4\.5 MiB"):
        blocks_that_fit(3 * 2**20, 9 * 2**19, max_useful=50)


@pytest.mark.parametrize("left", [99, 0, -(2**30)])
def test_too_little_memory_is_an_error_that_says_what_to_change(left: int) -> None:
    with pytest.raises(ConfigError, match=r"0\.0 MiB are left .* raise kv_cache_memory or gpu_memory_utilization"):
        blocks_that_fit(left, 100, max_useful=50)


GPU = torch.device("cuda", 0)
GIB = 2**30


@pytest.fixture
def shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, of which others use 20; torch has reserved 20, holds 15 of weights, and once held 18."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20 * GIB)
    statistics = {"allocated_bytes.all.current": 15 * GIB, "allocated_bytes.all.peak": 18 * GIB}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: statistics)


@pytest.mark.usefixtures("shared_gpu")
@pytest.mark.parametrize(("utilization", "expected"), [(0.9, 72 - 20 - 15 - 3), (1.0, 42)])
def test_a_gpu_has_what_others_weights_and_activations_leave(utilization: float, expected: int) -> None:
    config = EngineConfig(model="m", gpu_memory_utilization=utilization)
    assert gpu_memory_for_cache(config, GPU, useful=100 * GIB) == expected * GIB


@pytest.mark.usefixtures("shared_gpu")
def test_a_gpu_also_has_to_hold_the_graphs() -> None:
    config = EngineConfig(model="m", gpu_memory_utilization=0.9)
    assert gpu_memory_for_cache(config, GPU, useful=100 * GIB, graphs=3 * GIB) == 31 * GIB
    with pytest.raises(ConfigError, match="which has 39.00 GiB left"):
        gpu_memory_for_cache(EngineConfig(model="m", kv_cache_memory="42GiB"), GPU, useful=100 * GIB, graphs=3 * GIB)


@pytest.mark.usefixtures("shared_gpu")
def test_a_configured_pool_must_fit_what_is_left_of_a_gpu() -> None:
    fits, too_large = (EngineConfig(model="m", kv_cache_memory=size) for size in ("42GiB", "43GiB"))
    assert gpu_memory_for_cache(fits, GPU, useful=100 * GIB) == 42 * GIB
    message = "kv_cache_memory takes 43.00 GiB of cuda:0, which has 42.00 GiB left after the warm-up; lower it"
    with pytest.raises(ConfigError, match=message):
        gpu_memory_for_cache(too_large, GPU, useful=100 * GIB)
    assert gpu_memory_for_cache(too_large, GPU, useful=30 * GIB) == 30 * GIB
    halves = EngineConfig(model="m", kv_cache_memory="84GiB", tensor_parallel_size=2)
    assert gpu_memory_for_cache(halves, GPU, useful=100 * GIB) == 42 * GIB


@pytest.mark.parametrize(
    ("options", "available", "expected"), [({}, 64, 4), ({}, 8, 2), ({"kv_cache_memory": "12GiB"}, 8, 12)]
)
def test_the_ranks_of_a_cpu_share_the_pool(
    options: dict[str, str], available: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_host_memory", lambda: available * GIB)
    for size in (1, 2, 4):
        config = EngineConfig.from_options("m", options | {"tensor_parallel_size": size})
        assert host_memory_for_cache(config) == expected * GIB // size


def test_a_model_whose_block_exceeds_kv_cache_memory_is_refused(qwen3: SavedModel) -> None:
    with pytest.raises(ConfigError, match="one block takes .* raise kv_cache_memory"):
        ModelRunner(EngineConfig(model=qwen3.path, device="cpu", kv_cache_memory="1KiB"))


def test_the_smallest_pool_holds_a_prompt_token_and_an_answers(qwen3: SavedModel) -> None:
    options: dict[str, Any] = {"model": qwen3.path, "device": "cpu", "num_blocks": 1}
    assert ModelRunner(EngineConfig(**options, block_size=2)).info.num_blocks == 1
    with pytest.raises(ConfigError, match="num_blocks=1 of block_size=1 holds no prompt with an answer; raise one"):
        ModelRunner(EngineConfig(**options, block_size=1))


def test_the_log_says_blocks_tokens_gib_and_full_length_requests(
    qwen3: SavedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="engine.worker.model_runner")
    options: dict[str, Any] = {"block_size": 16, "num_blocks": 24, "max_model_len": 128, "swap_space_gib": 0.0}
    config = EngineConfig(model=qwen3.path, device="cpu", **options)
    runner = ModelRunner(config)
    lines = [record.getMessage() for record in caplog.records]
    size = runner.workers.local.kv_cache.num_bytes / 2**30
    assert lines[-2:] == [
        f"CPU KV cache size: 384 tokens in {runner.info.dtype}, 24 blocks of 16 in {size:.2f} GiB",
        "Maximum concurrency for 128 tokens per request: 3.00x",
    ]
    assert runner.workers.local.kv_cache.blocks.bytes_per_page == runner.workers.local.shard.page_sizes.block
    assert runner.workers.local.kv_cache.blocks.num_host_pages == 0


def test_the_log_says_what_the_host_keeps(qwen3: SavedModel, caplog: pytest.LogCaptureFixture) -> None:
    options = {"device": "cpu", "num_blocks": 24, "swap_space_gib": 0.01, "tensor_parallel_size": 1}
    with caplog.at_level(logging.INFO):
        runner = ModelRunner(EngineConfig.from_options(qwen3.path, options))
    message = (
        f"Host memory for preempted requests and evicted prefixes: {runner.info.num_host_blocks} blocks, 0 pages of "
        "windows and 0 states in 0.01 GiB"
    )
    assert message in caplog.messages


def test_without_a_size_the_host_pool_of_a_cpu_is_a_stated_share(
    qwen3: SavedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = PageSizes(block=2**20, windows=(), slot=0, block_size=16)
    config = EngineConfig(model=qwen3.path)
    for available, num_blocks, expected in ((2**33, 100, 400), (2**30, 100, 128), (2**40, 10**6, 4096), (2**20, 9, 0)):
        monkeypatch.setattr(memory, "available_host_memory", lambda available=available: available)
        pools = memory.host_pools_for(config, PoolSizes(num_blocks), sizes, 4096)
        assert pools.num_host_blocks == expected
        assert memory.host_pools_for(config, PoolSizes(num_blocks), sizes, 4096, is_on_gpu=True).num_host_blocks == 0
    with caplog.at_level(logging.INFO):
        memory.host_pools_for(config, PoolSizes(10**6), sizes, 4096)
        monkeypatch.setattr(memory, "available_host_memory", lambda: 2**33)
        memory.host_pools_for(config, PoolSizes(10**6), sizes, 4096)
    assert "swap_space_gib is not set: 1.00 GiB of host memory, taken little by little ahead of its use" in caplog.text


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says what a process holds")
def test_a_start_touches_nothing_of_the_pool_on_a_cpu(qwen3: SavedModel) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    runner = ModelRunner(EngineConfig(model=qwen3.path, device="cpu", kv_cache_memory="1GiB", max_num_seqs=10**6))
    assert runner.workers.local.kv_cache.num_bytes > 2**29
    assert resident() - before < 2**27


def host_pools(swap_space_gib: float, sizes: PageSizes, **options: Any) -> PoolSizes:
    config = EngineConfig(model="m", device="cpu", swap_space_gib=swap_space_gib, **options)
    return host_pools_for(config, PoolSizes(1), sizes, max_model_len=100)


def test_the_host_pool_takes_the_swap_space_and_not_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_host_memory", lambda: 8 * 2**30)
    for swap_space_gib, block, num_blocks in ((0, 2**20, 0), (2, 2**20, 2048), (0.5, 3 * 2**20, 170), (8, 2**30, 8)):
        sizes = PageSizes(block=block, windows=(), slot=0, block_size=16)
        assert host_pools(swap_space_gib, sizes).num_host_blocks == num_blocks
        assert host_pools(swap_space_gib, sizes, tensor_parallel_size=2).num_host_blocks == num_blocks // 2


def test_the_swap_space_is_divided_between_blocks_pages_of_windows_and_states() -> None:
    sizes = PageSizes(block=1000, windows=((24, 500),), slot=7000, block_size=16)
    memory = 3 * (7 * 1000 + 3 * 500 + 3 * 7000)  # three sequences of 100 tokens, each with two snapshots
    pools = host_pools((memory + 600) / 2**30, sizes, state_snapshots=2)
    assert (pools.num_host_blocks, pools.num_host_window_pages, pools.num_host_slots) == (21, (9,), 9)
    pools = host_pools(23_500 / 2**30, sizes, state_snapshots=2)  # for a shorter sequence
    assert (pools.num_host_blocks, pools.num_host_window_pages, pools.num_host_slots) == (2, (1,), 3)


def test_where_no_layer_attends_to_everything_the_host_names_blocks_without_memory() -> None:
    pools = host_pools(70_000 / 2**30, PageSizes(block=0, windows=(), slot=7000, block_size=16), state_snapshots=4)
    assert (pools.num_host_blocks, pools.num_host_slots) == (14, 10)


def test_a_swap_space_beyond_the_machine_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_host_memory", lambda: 3 * 2**29)
    with pytest.raises(ConfigError, match=r"swap_space_gib=1\.6 exceeds the 1\.50 GiB of memory .* lower it"):
        host_pools(1.6, PageSizes(block=2**20, windows=(), slot=0, block_size=16))


def test_a_swap_space_below_one_block_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"swap_space_gib=0\.001 holds no block, which takes 2\.00 MiB; raise it"):
        host_pools(0.001, PageSizes(block=2**21, windows=(), slot=0, block_size=16))


def test_a_container_has_what_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With version 1 of control groups, as with version 2."""
    group = tmp_path / "memory"
    group.mkdir()
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    for name, text in (("limit_in_bytes", "3000"), ("usage_in_bytes", "2000"), ("stat", "total_inactive_file 500")):
        (group / f"memory.{name}").write_text(f"{text}\n")
    assert available_host_memory() == 1500
    assert host_memory_for_cache(EngineConfig(model="m", device="cpu")) == 375


def test_a_machine_has_some_memory_available() -> None:
    assert 2**20 < available_host_memory() < 2**50


def test_memory_that_is_less_than_a_step_writes_holds_every_block_with_its_pages() -> None:
    sizes = PageSizes(block=64, windows=((40, 32), (50, 32)), slot=0, block_size=4)
    limits = {"max_model_len": 200, "max_num_seqs": 8, "max_step_tokens": 2048, "num_snapshots": 0}
    pools = sizes.divide(128 * 30, num_tokens=100, **limits)
    assert (pools.num_blocks, pools.num_window_pages) == (30, (30, 30))
    assert sizes.num_bytes(pools) == 128 * 30
    assert sizes.divide(128 * 30, num_tokens=121, **limits).num_blocks == 0
