"""Which backend is chosen, and the error for a wrong choice."""

from __future__ import annotations

import sys

import pytest
import torch

from kernels.attention import AttentionBackend, select_backend
from kernels.attention.cpu_backend import CpuBackend
from kernels.attention.flash_attn_backend import FlashAttnBackend
from tests.kernels.attention import fake_flash_attn

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def _pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_a_cpu_gets_the_cpu_backend() -> None:
    assert select_backend(CPU).name == "cpu"
    assert select_backend(CPU, "cpu").default_block_size == 16


def test_a_gpu_gets_flash_attn_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    backend = select_backend(CUDA)
    assert (backend.name, backend.default_block_size) == ("flash_attn", 256)


@pytest.mark.parametrize("capability", [(9, 0), (7, 5)])
def test_a_gpu_gets_triton_where_flash_attn_is_missing_or_the_gpu_too_old(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    pytest.importorskip("triton")
    _pretend_gpu(monkeypatch, capability)
    # None makes the import fail, as a wheel that was built against another torch does.
    monkeypatch.setitem(sys.modules, "flash_attn", None if capability >= (8, 0) else fake_flash_attn)
    backend = select_backend(CUDA)
    assert (backend.name, backend.default_block_size) == ("triton", 16)


@pytest.mark.parametrize(
    ("device", "name", "message"),
    [
        (CPU, "flashinfer", "unknown attention backend 'flashinfer'; choose auto, cpu, triton or flash_attn"),
        (CPU, "flash_attn", "'flash_attn' cannot run on device 'cpu': it needs a CUDA device; use auto or cpu"),
        (CUDA, "cpu", "'cpu' cannot run on device 'cuda'; use auto, triton or flash_attn"),
        (torch.device("mps"), "auto", "no attention backend runs on device 'mps'; use a cpu or cuda device"),
    ],
)
def test_an_error_names_the_choices(device: torch.device, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_backend(device, name)


def test_triton_on_a_cpu_is_for_its_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"'triton' cannot run on device 'cpu'; use auto or cpu, or set TRITON_INTERP"):
        select_backend(CPU, "triton")


def test_an_error_says_why_flash_attn_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    _pretend_gpu(monkeypatch, (9, 0))
    with pytest.raises(ValueError, match=r"flash-attn cannot be imported .*; use auto or triton"):
        select_backend(CUDA, "flash_attn")
    _pretend_gpu(monkeypatch, (7, 5))
    with pytest.raises(ValueError, match=r"compute capability 8\.0 or newer; use auto or triton"):
        select_backend(CUDA, "flash_attn")


def _backends(monkeypatch: pytest.MonkeyPatch) -> dict[str, AttentionBackend]:
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    pytest.importorskip("triton")
    from kernels.attention.triton_backend import TritonBackend

    return {backend.name: backend for backend in (CpuBackend(), TritonBackend(), FlashAttnBackend())}


@pytest.mark.parametrize(
    ("name", "block_size"),
    [("cpu", 1), ("cpu", 7), ("triton", 1), ("triton", 16), ("triton", 256), ("flash_attn", 256), ("flash_attn", 768)],
)
def test_usable_block_sizes(monkeypatch: pytest.MonkeyPatch, name: str, block_size: int) -> None:
    _backends(monkeypatch)[name].check_block_size(block_size)


@pytest.mark.parametrize(
    ("name", "block_size", "message"),
    [
        ("cpu", 0, "block_size=0 .* needs 1 or more"),
        ("triton", 0, "block_size=0 is not a power of two.*use 1 or 2"),
        ("triton", 24, "block_size=24 is not a power of two.*use 16 or 32"),
        ("flash_attn", 16, "block_size=16 is not a multiple of 256.*use 256, or the triton attention backend"),
        ("flash_attn", 0, "block_size=0 is not a multiple of 256"),
    ],
)
def test_unusable_block_sizes(monkeypatch: pytest.MonkeyPatch, name: str, block_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _backends(monkeypatch)[name].check_block_size(block_size)
