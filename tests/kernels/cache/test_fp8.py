"""Conversions to and from FP8: torch's, Triton's, and the PTX that a GPU runs in place of interpreted operations."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from kernels.cache.fp8 import FP8, LARGEST, from_fp8, to_fp8

HALVES = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)  # all bits of 16
WORDS = HALVES.view(torch.uint16)
IS_NAN = (HALVES.view(torch.uint8) & 0x7F) == 0x7F  # the code of NaN, which to_fp8 does not return


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.37, 1e-30])
def test_what_is_stored_is_the_nearest_number_and_never_nan(dtype: torch.dtype, scale: float) -> None:
    numbers = HALVES.view(dtype)
    stored = from_fp8(to_fp8(numbers, scale))
    assert not stored.isnan().any()
    scaled = (numbers.double() * torch.tensor(1.0 / scale).double()).clamp(-LARGEST, LARGEST)
    every = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    every = every[every.isfinite()].unique()
    after = torch.searchsorted(every, scaled.nan_to_num()).clamp(1, len(every) - 1)
    distance = torch.minimum((every[after] - scaled).abs(), (every[after - 1] - scaled).abs())
    rounding = 2.0**-22 * scaled.abs()  # of the product with the scale
    is_nearest = (stored.double() - scaled).abs() <= distance + rounding
    assert is_nearest[~numbers.isnan()].all()
    assert (stored[numbers.isnan()].abs() == LARGEST).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 0.37, 1e-30])
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # infinities, as on a GPU
def test_triton_rounds_as_torch_does(kernel_device: torch.device, dtype: torch.dtype, scale: float) -> None:
    if dtype == torch.float32:  # what ties and their neighbours are, and what is too small
        numbers = (torch.arange(2**16, dtype=torch.int32) << 16 | torch.randint(2**16, (2**16,))).view(torch.float32)
        ties = torch.arange(-512, 512) * 2.0**-10 * scale
        numbers = torch.cat((numbers, ties, ties.nextafter(torch.tensor(9.0)), ties.nextafter(torch.tensor(-9.0))))
    else:
        numbers = HALVES.view(dtype)
    from tests.kernels.cache.fp8_kernels import encode

    numbers = numbers.to(kernel_device)
    codes, is_nan = encode(numbers, scale), numbers.isnan()
    assert torch.equal(codes[~is_nan], to_fp8(numbers, scale).view(torch.uint8)[~is_nan])
    assert (codes[is_nan] & 0x7F == 0x7E).all()  # of either sign: a GPU's products with NaN have none


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_triton_reads_every_number(kernel_device: torch.device, dtype: torch.dtype) -> None:
    from tests.kernels.cache.fp8_kernels import decode

    low, high = decode(WORDS.to(kernel_device), dtype)
    got, expected = torch.stack((low, high), dim=1).flatten().cpu(), WORDS.view(FP8)
    assert torch.equal(got[~IS_NAN], from_fp8(expected)[~IS_NAN].to(dtype))
    assert (got[IS_NAN].abs() == 480.0).all()


_PTX_OPERATIONS: dict[str, Any] = {
    "shl": lambda a, b: a << b & 0xFFFFFFFF,
    "shr": lambda a, b: a >> b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
}


def _run_ptx(text: str, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run integer operations on registers of 32 bits, each with two of the words, and return $0 and $1."""
    registers: dict[str, Any] = {"$2": words.view(torch.int32).long() & 0xFFFFFFFF}

    def value(name: str) -> Any:
        return registers[name] if name in registers else int(name, 0)

    lines = re.findall(r"(shl|shr|and|or)\.b32 (\S+), (\S+), (\S+);", text)
    assert len(lines) == text.count(".b32") - text.count(".reg")  # nothing else is in it
    for operation, target, first, second in lines:
        registers[target] = _PTX_OPERATIONS[operation](value(first), value(second))
    low, high = (registers[name].to(torch.int32).view(torch.int16) for name in ("$0", "$1"))
    return low, high


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_ptx_gives_the_same_numbers(kernel_device: torch.device, dtype: torch.dtype) -> None:
    from kernels.cache.triton import fp8

    name = str(dtype).removeprefix("torch.").upper()
    text, factor = (getattr(fp8, f"_{name}_{part}").value for part in ("PTX", "FACTOR"))
    low, high = _run_ptx(text, WORDS)
    got = torch.stack((low, high), dim=1).flatten().view(dtype) * factor
    assert torch.equal(got[~IS_NAN], from_fp8(WORDS.view(FP8))[~IS_NAN].to(dtype))
