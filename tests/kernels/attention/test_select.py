"""Which backend is chosen, and the error for a wrong choice."""

from __future__ import annotations

import re
import sys
from importlib import import_module

import pytest
import torch

from kernels.attention.base import AttentionBackend
from kernels.attention.cpu_backend import CpuBackend
from kernels.attention.flash.flash_attn import FlashAttnBackend
from kernels.attention.flash.flash_attn_3 import FlashAttn3Backend
from kernels.attention.registry import BACKENDS, BackendEntry
from kernels.attention.select import select_backend
from tests.kernels.attention import fake_flash_attn, fake_flash_attn_3

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def no_flash_attn_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)


def _pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_a_cpu_gets_the_cpu_backend() -> None:
    assert select_backend(CPU, FP32).name == "cpu"
    assert select_backend(CPU, BF16, "cpu").default_block_size == 16
    assert select_backend(CPU, BF16).uses_cpu_kernels


def test_a_gpu_gets_flash_attn_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    backend = select_backend(CUDA, BF16)
    assert (backend.name, backend.default_block_size) == ("flash_attn", 256)
    assert not backend.uses_cpu_kernels


def test_a_hopper_gets_flash_attn_3_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash_attn_3)
    for capability, name in (((9, 0), "flash_attn_3"), ((8, 0), "flash_attn"), ((10, 0), "flash_attn")):
        _pretend_gpu(monkeypatch, capability)
        assert select_backend(CUDA, BF16).name == name
    with pytest.raises(ValueError, match=r"'flash_attn_3' cannot run .* Hopper generation, compute capability 9"):
        select_backend(CUDA, BF16, "flash_attn_3")


def test_a_choice_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    _pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    reason = select_backend(CUDA, BF16).why_chosen
    assert re.fullmatch(r"the fastest for bfloat16 here; flash_attn_3: .*imported.*; flash_attn: .*imported.*", reason)
    assert select_backend(CUDA, FP32).why_chosen == "the fastest for float32 here"
    assert select_backend(CUDA, FP32, "triton").why_chosen == "configured"


def test_splits_of_flash_attn_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    _pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    invariant = frozenset({"batch_invariant"})
    assert select_backend(CUDA, BF16, options=invariant).name == "triton"
    assert select_backend(CPU, BF16, options=invariant).name == "cpu"
    with pytest.raises(ValueError, match="'flash_attn' .* does not compute batch_invariant, .*; use auto or triton"):
        select_backend(CUDA, BF16, "flash_attn", invariant)


def test_keys_in_fp8_are_read_by_triton_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    _pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    fp8 = frozenset({"fp8"})
    assert select_backend(CUDA, BF16, options=fp8).name == "triton"
    with pytest.raises(ValueError, match="'flash_attn' .* does not compute fp8, .*; use auto or triton"):
        select_backend(CUDA, BF16, "flash_attn", fp8)


def test_float32_on_a_gpu_gets_triton_because_flash_attn_does_not_compute_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    _pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    assert select_backend(CUDA, FP32).name == "triton"
    with pytest.raises(ValueError, match="'flash_attn' .*it computes bfloat16 or float16, not float32; use auto or"):
        select_backend(CUDA, FP32, "flash_attn")


@pytest.mark.parametrize("capability", [(9, 0), (7, 5)])
def test_a_gpu_gets_triton_where_flash_attn_is_missing_or_the_gpu_too_old(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    pytest.importorskip("triton")
    _pretend_gpu(monkeypatch, capability)
    # None makes the import fail, as a wheel that was built against another torch does.
    monkeypatch.setitem(sys.modules, "flash_attn", None if capability >= (8, 0) else fake_flash_attn)
    backend = select_backend(CUDA, BF16)
    assert (backend.name, backend.default_block_size) == ("triton", 16)


@pytest.mark.parametrize(
    ("device", "name", "message"),
    [
        (
            CPU,
            "flashinfer",
            "unknown .*'flashinfer'; choose auto, cpu, flash_attn_3, flash_attn or triton",
        ),
        (CPU, "flash_attn", "'flash_attn' cannot run on device 'cpu': it needs a cuda device; use auto or cpu"),
        (
            CUDA,
            "cpu",
            "'cpu' cannot run .*: it needs a cpu device; use auto, flash_attn_3, flash_attn or triton",
        ),
        (torch.device("mps"), "auto", "computes bfloat16 on device 'mps'; use a cpu or cuda device"),
    ],
)
def test_an_error_names_the_choices(device: torch.device, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_backend(device, BF16, name)


def test_a_dtype_that_no_backend_computes_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="float64 on device 'cpu'; choose the dtype float32, bfloat16 or float16"):
        select_backend(CPU, torch.float64)


def test_triton_on_a_cpu_is_for_its_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    import_module("kernels.attention.triton.backend")  # what is imported below stays as it is then
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"'triton' cannot run .*, or TRITON_INTERPRET=1 .*; use auto or cpu"):
        select_backend(CPU, FP32, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select_backend(CPU, FP32, "triton").name == "triton"


def test_an_error_says_why_flash_attn_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    _pretend_gpu(monkeypatch, (9, 0))
    with pytest.raises(ValueError, match=r"cannot be imported \(.*flash_attn.*\); use auto, flash_attn_3 or triton"):
        select_backend(CUDA, BF16, "flash_attn")
    _pretend_gpu(monkeypatch, (7, 5))
    with pytest.raises(ValueError, match=r"compute capability 8\.0 or newer; use auto, flash_attn_3 or triton"):
        select_backend(CUDA, BF16, "flash_attn")


def test_a_backend_that_lacks_an_option_of_the_model_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    _pretend_gpu(monkeypatch, (9, 0))
    softcap, sinks = frozenset({"softcap"}), frozenset({"sinks"})
    assert select_backend(CPU, FP32, options=softcap | sinks).name == "cpu"
    assert select_backend(CUDA, BF16, options=softcap).name == "flash_attn"
    assert select_backend(CUDA, BF16, options=frozenset({"large_heads"})).name == "triton"
    assert select_backend(CUDA, BF16, options=sinks).name == "triton"
    with pytest.raises(ValueError, match="'flash_attn' .* compute sinks, .*; use auto or triton"):
        select_backend(CUDA, BF16, "flash_attn", softcap | sinks)


def test_an_error_says_why_no_backend_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "kernels.attention.triton.backend", None)
    _pretend_gpu(monkeypatch, (9, 0))
    with pytest.raises(ValueError, match=r"flash_attn_3: .*; flash_attn: .*imported.*; triton: .*imported"):
        select_backend(CUDA, BF16)


@pytest.mark.parametrize(("name", "entry"), BACKENDS.items())
def test_every_line_of_the_table_leads_to_its_backend(name: str, entry: BackendEntry) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    backend_class = getattr(import_module(f"kernels.attention.{entry.module}"), entry.class_name)
    assert issubclass(backend_class, AttentionBackend)
    assert backend_class.name == name


def _backends(monkeypatch: pytest.MonkeyPatch) -> dict[str, AttentionBackend]:
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash_attn_3)
    pytest.importorskip("triton")
    from kernels.attention.triton.backend import TritonBackend

    backends = (CpuBackend(), TritonBackend(), FlashAttnBackend(), FlashAttn3Backend())
    return {backend.name: backend for backend in backends}


@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        ("cpu", 1),
        ("cpu", 7),
        ("triton", 1),
        ("triton", 16),
        ("triton", 256),
        ("flash_attn", 256),
        ("flash_attn", 768),
        ("flash_attn_3", 24),
    ],
)
def test_usable_block_sizes(monkeypatch: pytest.MonkeyPatch, name: str, block_size: int) -> None:
    _backends(monkeypatch)[name].check_block_size(block_size)


@pytest.mark.parametrize(
    ("name", "block_size", "message"),
    [
        ("cpu", 0, "block_size=0 .* needs 1 or more"),
        ("flash_attn_3", 0, "block_size=0 .* needs 1 or more"),
        ("triton", 0, "block_size=0 is not a power of two.*use 1 or 2"),
        ("triton", 24, "block_size=24 is not a power of two.*use 16 or 32"),
        ("flash_attn", 16, "block_size=16 is not a multiple of 256.*use 256, or the triton attention backend"),
        ("flash_attn", 0, "block_size=0 is not a multiple of 256"),
    ],
)
def test_unusable_block_sizes(monkeypatch: pytest.MonkeyPatch, name: str, block_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _backends(monkeypatch)[name].check_block_size(block_size)
