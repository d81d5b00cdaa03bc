"""The device of a rank, on a machine that claims to have GPUs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.worker import device as device_module
from engine.worker.device import default_num_threads, resolve_device, set_rank_threads
from kernels.device_copy import use_device

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Four GPUs, of which 2 is current; return a list that grows by each device that is made current."""
    chosen: list[int] = []
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    # What torch.cuda.set_device calls once it has found an index; before, it raises ValueError for a device without.
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    return chosen


@pytest.mark.parametrize(
    ("name", "size", "rank", "index"),
    [
        ("auto", 1, 0, 2),
        ("cuda", 1, 0, 2),
        ("cuda:0", 1, 0, 0),
        ("cuda:3", 1, 0, 3),
        ("auto", 4, 3, 3),
        ("auto", 4, None, 2),
    ],
)
def test_a_gpu_has_an_index_and_can_be_made_current(
    four_gpus: list[int], name: str, size: int, rank: int | None, index: int
) -> None:
    device = resolve_device(EngineConfig(model="m", device=name, tensor_parallel_size=size), rank)
    assert device == torch.device("cuda", index)
    use_device(device)
    assert four_gpus == [index]


def test_the_allocator_expands_its_segments_from_before_cuda_is_initialised(
    four_gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def current_device() -> int:  # initialises CUDA
        seen.append(os.environ.get("PYTORCH_ALLOC_CONF"))
        return 2

    monkeypatch.setattr(torch.cuda, "current_device", current_device)
    resolve_device(EngineConfig(model="m", device="cuda"), 0)
    assert seen == ["expandable_segments:True"]


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_a_users_own_allocator_settings_stay(four_gpus: list[int], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    resolve_device(EngineConfig(model="m", device="cuda"), 0)
    assert [os.environ.get(variable) for variable in ALLOCATOR_VARIABLES if variable in os.environ] == [
        "max_split_size_mb:64"
    ]


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("given", [None, "TRITON_HOME", "TRITON_CACHE_DIR"])
def test_triton_has_a_directory_without_a_home(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("TRITON_HOME", "TRITON_CACHE_DIR")
    for name in names:
        monkeypatch.setenv(name, "given")  # so that it is restored
        if name != given:
            monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    resolve_device(EngineConfig(model="m", device="cuda"), 0)
    expected = {"TRITON_HOME": str(tmp_path / f"pagoda-{os.geteuid()}")} if given is None else {given: "given"}
    assert {name: os.environ[name] for name in names if name in os.environ} == expected


def test_triton_uses_a_home_that_can_be_written(
    four_gpus: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    resolve_device(EngineConfig(model="m", device="cuda"), 0)
    assert "TRITON_HOME" not in os.environ


@pytest.mark.usefixtures("four_gpus")
def test_a_gpu_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match="device='cuda:4' does not exist: the last GPU here is cuda:3"):
        resolve_device(EngineConfig(model="m", device="cuda:4"), 0)


def test_without_a_gpu_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = dict(os.environ)
    assert resolve_device(EngineConfig(model="m", device="auto"), 0) == torch.device("cpu")
    assert resolve_device(EngineConfig(model="m", device="cpu"), 0) == torch.device("cpu")
    assert dict(os.environ) == before


@pytest.fixture
def eight_torch_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Torch has a thread for each of eight cores; return a list that starts with 8 and gets what it is set to."""
    threads = [8]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    return threads


@pytest.mark.parametrize(("cpus", "expected"), [(2, [8, 2]), (1, [8, 1]), (64, [8])])
def test_threads_are_no_more_than_the_cpus_of_a_quota(
    eight_torch_threads: list[int], cpus: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_kernels: list[int] = []
    monkeypatch.setattr(device_module, "available_cpus", lambda: cpus)
    monkeypatch.setattr(device_module, "set_num_threads", of_kernels.append)
    set_rank_threads(EngineConfig(model="m", device="cpu"), 0, has_cpu_kernels=True)
    assert eight_torch_threads == expected
    assert of_kernels == [min(8, cpus)]


def test_a_users_own_number_of_threads_stays(eight_torch_threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "available_cpus", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert default_num_threads() == 8
    monkeypatch.delenv("OMP_NUM_THREADS")
    set_rank_threads(EngineConfig(model="m", device="cpu", num_threads=6), 0, has_cpu_kernels=False)
    assert eight_torch_threads[-1] == 6


@pytest.mark.parametrize(("owns_host", "expected"), [(False, 2), (True, 8)])
def test_a_rank_that_owns_its_host_has_all_of_its_threads(
    eight_torch_threads: list[int], owns_host: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "available_cpus", lambda: 64)
    config = EngineConfig(model="m", device="cpu", num_threads=8, tensor_parallel_size=4)
    set_rank_threads(config, 3, has_cpu_kernels=False, owns_host=owns_host)
    assert eight_torch_threads[-1] == expected
