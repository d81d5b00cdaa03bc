"""Which linear method computes what, and why others do not."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kernels.cpu.library import library
from kernels.cpu.linear import has_int8
from kernels.linear import packed
from kernels.linear.base import LinearMethod
from kernels.linear.registry import LINEAR_METHODS, QUANTIZATIONS, quantization_devices
from kernels.linear.select import select_linear_method

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "library", lambda: object())
    monkeypatch.setattr(packed, "has_int8", lambda: True)


def select(device: torch.device, dtype: torch.dtype, quantization: str | None, *options: str) -> str:
    return select_linear_method(device, dtype, quantization, frozenset(options)).name


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("device", "dtype", "quantization", "options", "name"),
    [
        (CPU, torch.float32, None, (), "packed"),
        (CPU, torch.bfloat16, None, ("batch_invariant", "experts"), "packed"),
        (CPU, torch.float16, None, ("experts",), "torch"),
        (CPU, torch.bfloat16, "int8", ("experts",), "packed_int8"),
        (CPU, torch.float16, "int8", (), "torch_int8"),
        (GPU, torch.bfloat16, None, ("experts",), "torch"),
        (GPU, torch.bfloat16, None, ("experts", "batch_invariant"), "triton"),
    ],
)
def test_the_first_that_can_is_taken(
    device: torch.device, dtype: torch.dtype, quantization: str | None, options: tuple[str, ...], name: str
) -> None:
    assert select(device, dtype, quantization, *options) == name


def test_a_choice_says_why_others_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "library", lambda: None)
    method = select_linear_method(CPU, torch.float32)
    assert method.name == "torch"
    assert method.why_chosen == "the fastest for float32 here; packed: the C kernels cannot be compiled"
    method = select_linear_method(CPU, torch.float32, "int8", may_pack=False)
    assert method.name == "torch_int8"
    assert "packed_int8: the C kernels do not compute this model" in method.why_chosen


@pytest.mark.parametrize(
    ("device", "dtype", "quantization", "message"),
    [
        (CPU, torch.float16, None, "no linear method computes float16 on device 'cpu'; .*torch: it lacks batch_inv"),
        (CPU, torch.float16, "int8", "packed_int8: it does not compute float16; torch_int8: it lacks batch_invariant"),
        (GPU, torch.float32, "int8", "no linear method computes float32 on device 'cuda:0'"),
    ],
)
def test_what_none_computes_is_an_error(
    device: torch.device, dtype: torch.dtype, quantization: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        select(device, dtype, quantization, "batch_invariant")


@pytest.mark.skipif(library() is None or has_int8(), reason="the processor multiplies int8, or there is no C compiler")
def test_a_processor_without_the_instruction_takes_torch() -> None:
    assert select(CPU, torch.float32, "int8") == "torch_int8"


def test_the_table_is_read_without_torch() -> None:
    program = "import sys, kernels.linear.registry; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert QUANTIZATIONS == ("int8", "int4", "dequantize")
    assert (quantization_devices("int8"), quantization_devices(None)) == (("cpu",), ("cpu", "cuda"))


@pytest.mark.parametrize("name", sorted(set(LINEAR_METHODS) - {"triton"}))
def test_every_line_names_its_class(name: str) -> None:
    entry = LINEAR_METHODS[name]
    module = __import__(f"kernels.linear.{entry.module}", fromlist=[entry.class_name])
    method = getattr(module, entry.class_name)
    assert issubclass(method, LinearMethod)
    assert method.name == name
