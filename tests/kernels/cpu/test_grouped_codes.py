"""Quantised weights decoded in C have the bits of torch's operators: all codes, scales of every kind, all sizes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from kernels.cpu import grouped_codes
from kernels.dequant import bitsandbytes, fp4, gguf, integers
from kernels.dequant.fp8 import dequantise_fp8
from kernels.dequant.gguf_types import GGUF_TYPES

SCALES = torch.tensor(
    [1.0, -0.37, 0.0, -0.0, 2.0**-127, 1e-45, -3e-38, 2.0**120, 3e38, torch.inf, -torch.inf, torch.nan, 0.0123]
)
ROWS = 5
DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Case:
    """A function with and without ``out``, and the shape of its result."""

    decode: Callable[[torch.Tensor | None], torch.Tensor]
    shape: tuple[int, ...]


def octets(*shape: int) -> torch.Tensor:
    """Return all bytes again and again, in another order in each row."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 167 + torch.arange(count) // 256) % 256).to(torch.uint8).view(shape)


def scales(*shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return SCALES[torch.arange(count) % len(SCALES)].view(shape)


def groups_of(columns: int, size: int) -> int:
    return -(-columns // size)


def of_fp8(columns: int, group: int, dtype: torch.dtype, block_rows: int, first: int) -> Case:
    codes = octets(ROWS, columns).view(dtype)
    grid = scales(groups_of(first + ROWS, block_rows), groups_of(columns, group))
    return Case(lambda out: dequantise_fp8(codes, grid, (block_rows, group), first, out=out), (ROWS, columns))


def of_fp4(columns: int, group: int) -> Case:
    codes, grid = octets(ROWS, columns // 2), scales(ROWS, groups_of(columns, group))
    return Case(lambda out: fp4.dequantise_fp4(codes, grid, group, out=out), (ROWS, columns))


def of_packed(columns: int, group: int, bits: int, zeros: str) -> Case:
    words = octets(ROWS, 4 * groups_of(columns * bits, 32)).view(torch.int32)
    grid = scales(ROWS, groups_of(columns, group))
    offsets = {
        "one": 8,
        "none": 0,
        "each": (torch.arange(grid.numel()).view(grid.shape) % (1 << bits)).to(torch.uint8),
        "of columns": torch.arange(grid.shape[1], dtype=torch.int8)[None] - 3,
    }[zeros]
    return Case(
        lambda out: integers.dequantise_packed(words, bits, columns, grid, offsets, group, out=out), (ROWS, columns)
    )


def of_int8(columns: int, group: int) -> Case:
    codes, grid = octets(ROWS, columns).view(torch.int8), scales(1, groups_of(columns, group))
    return Case(lambda out: integers.dequantise_groups(codes, grid, 0, group, out=out), (ROWS, columns))


def of_affine(columns: int, group: int, bits: int) -> Case:
    words = octets(ROWS, columns * bits // 8).view(torch.int32)
    grid = scales(ROWS, columns // group)
    biases = grid.flip(0).contiguous()
    return Case(
        lambda out: integers.dequantise_affine_packed(words, bits, columns, grid, biases, group, out=out),
        (ROWS, columns),
    )


def of_nf4(count: int, block: int, first: int) -> Case:
    codes, grid = octets(groups_of(count, 2)), scales(groups_of(first + 2 * groups_of(count, 2), block))
    table = torch.linspace(-1.0, 1.0, 16)
    return Case(
        lambda out: bitsandbytes.dequantise_4bit(codes, table, grid, block, first, out=out)[:count],
        (count,),
    )


def of_q8_0(columns: int) -> Case:
    rows = octets(ROWS, columns // 32 * 34)
    return Case(lambda out: gguf.dequantise_gguf(rows, GGUF_TYPES[8], out=out), (ROWS, columns))


CASES = {
    "FP8 of the tensor": of_fp8(300, 300, torch.float8_e4m3fn, ROWS, 0),
    "FP8 by output": of_fp8(257, 257, torch.float8_e4m3fn, 1, 0),
    "FP8 in blocks": of_fp8(2500, 128, torch.float8_e4m3fn, 2, 3),
    "FP8, a column": of_fp8(1, 1, torch.float8_e4m3fn, 1, 0),
    "E5M2 in groups": of_fp8(1040, 32, torch.float8_e5m2, 1, 0),
    "NVFP4": of_fp4(2080, 16),
    "MXFP4, a partial group": of_fp4(1042, 32),
    "int4": of_packed(1184, 128, 4, "one"),
    "int4, odd columns": of_packed(1185, 37, 4, "one"),
    "int4, zero points": of_packed(3001, 64, 4, "each"),
    "int8 in words": of_packed(1030, 1030, 8, "none"),
    "int8 in words, zero points": of_packed(77, 10, 8, "of columns"),
    "int8": of_int8(515, 100),
    "MLX, 4 bits": of_affine(1088, 64, 4),
    "MLX, 8 bits": of_affine(256, 32, 8),
    "NF4": of_nf4(4096, 64, 0),
    "NF4, from within a block, an odd number": of_nf4(1999, 64, 30),
    "Q8_0": of_q8_0(1056),
}


def bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of numbers, with one value for all NaNs."""
    kind = torch.int32 if values.dtype == torch.float32 else torch.int16
    return values.contiguous().view(kind).masked_fill(values.isnan(), 0x7FC0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    out = torch.full(case.shape, 7.0, dtype=dtype)
    assert case.decode(out).data_ptr() == out.data_ptr()
    expected = case.decode(None)
    assert expected.dtype == torch.float32
    assert torch.equal(bits(out), bits(expected.to(dtype)))


def test_several_threads_decode_at_once() -> None:
    cases = [case for case in CASES.values() for _ in range(3)]
    outs = [torch.empty(case.shape, dtype=torch.bfloat16) for case in cases]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda case, out: case.decode(out), cases, outs))
    for case, out in zip(cases, outs, strict=True):
        assert torch.equal(bits(out), bits(case.decode(None).bfloat16()))


@pytest.mark.parametrize("name", CASES)
def test_torch_computes_what_the_kernel_does_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    expected = bits(case.decode(None))
    half = torch.zeros(case.shape, dtype=torch.float16)
    assert torch.equal(bits(case.decode(half)), expected)
    monkeypatch.setattr(grouped_codes, "library", lambda: None)
    out = torch.zeros(case.shape)
    assert torch.equal(bits(case.decode(out)), expected)
    assert not half.any()
    assert not out.any()


@pytest.mark.parametrize("strip", ["codes", "groups", "rows"])
def test_nothing_is_read_beyond_what_there_is(strip: str) -> None:
    codes, grid, out = octets(3, 64), torch.ones(3, 8), torch.empty(3, 64)
    codes = codes[:, :63] if strip == "codes" else codes[:2] if strip == "rows" else codes
    grid = grid[:, :7] if strip == "groups" else grid
    assert not grouped_codes.decode_groups(out, codes, torch.ones(256), grid, 8)


def test_subnormal_numbers_stay_in_bfloat16() -> None:
    """The instruction that rounds to bfloat16 makes zeros of them."""
    out = torch.empty(1, 16, dtype=torch.bfloat16)
    codes = torch.ones(1, 16, dtype=torch.uint8)
    assert grouped_codes.decode_groups(out, codes, torch.full((256,), 2.0**-130), torch.ones(1, 1), 16)
    assert out.float().eq(2.0**-130).all()
