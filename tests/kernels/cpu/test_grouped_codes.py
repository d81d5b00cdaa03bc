"""Quantised weights decoded in C have the bits of torch's operators: all codes, scales of every kind, all sizes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from kernels.cpu import grouped_codes
from kernels.dequant import bit_fields, bitsandbytes, fp4, gguf, integers
from kernels.dequant.fp8 import dequantise_fp8
from kernels.dequant.gguf_types import GGUF_TYPES, GgufType
from kernels.dequant.scales import e8m0_numbers

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


def of_fp8(columns: int, group: int, dtype: torch.dtype, block_rows: int, first: int, rows: int = ROWS) -> Case:
    codes = octets(rows, columns).view(dtype)
    grid = scales(groups_of(first + rows, block_rows), groups_of(columns, group))
    return Case(lambda out: dequantise_fp8(codes, grid, (block_rows, group), first, out=out), (rows, columns))


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


def of_one_scale(columns: int) -> Case:
    """More codes than numbers, of all rows, with one scale and one zero point."""
    words = octets(40, columns).view(torch.int32)
    scale, zero = torch.full((1, 1), 0.37), torch.full((1, 1), 11.0)
    return Case(lambda out: integers.dequantise_packed(words, 8, columns, scale, zero, columns, out=out), (40, columns))


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


def of_exponents(columns: int, group: int) -> Case:
    """MXFP8, whose scales are bytes."""
    codes, grid = octets(ROWS, columns).view(torch.float8_e4m3fn), octets(ROWS, groups_of(columns, group))
    return Case(lambda out: dequantise_fp8(codes, grid, (1, group), out=out), (ROWS, columns))


def of_scale_table(columns: int, group: int) -> Case:
    codes, grid, table = octets(ROWS, columns // 2), octets(ROWS, groups_of(columns, group)), scales(256)
    return Case(lambda out: fp4.dequantise_fp4(codes, grid, group, scale_table=table, out=out), (ROWS, columns))


def of_awq(columns: int, group: int, num_words: int = 5) -> Case:
    words, rows = octets(columns, 4 * (num_words + 4)).view(torch.int32), 8 * num_words
    grid = scales(rows, groups_of(columns, group))
    zeros, own = torch.arange(grid.numel()).view(grid.shape) % 16, slice(2, 2 + num_words)
    return Case(lambda out: integers.dequantise_awq(words, own, grid, zeros.float(), group, out=out), (rows, columns))


def of_gptq(columns: int, group: int, rows: int, bits: int = 4) -> Case:
    words = octets(groups_of(columns * bits, 32), 4 * (rows + 5)).view(torch.int32)
    grid = scales(rows, groups_of(columns, group))
    zeros, own = (torch.arange(grid.numel()).view(grid.shape) % 16).float(), slice(3, 3 + rows)
    return Case(
        lambda out: integers.dequantise_gptq(words, own, bits, columns, grid, zeros, group, out=out), (rows, columns)
    )


def of_gguf(kind: GgufType) -> Case:
    columns = 3 * max(kind.block_elements, 96)
    generator = torch.Generator().manual_seed(kind.block_bytes)
    rows = torch.randint(0, 256, (40, kind.row_bytes(columns)), dtype=torch.uint8, generator=generator)
    return Case(lambda out: gguf.dequantise_gguf(rows, kind, out=out), (40, columns))


CASES = {
    "FP8 of the tensor": of_fp8(300, 300, torch.float8_e4m3fn, ROWS, 0),
    "FP8 by output": of_fp8(257, 257, torch.float8_e4m3fn, 1, 0),
    "FP8 in blocks": of_fp8(2500, 128, torch.float8_e4m3fn, 2, 3),
    "FP8 in blocks of many rows": of_fp8(300, 128, torch.float8_e4m3fn, 18, 7, rows=70),
    "FP8, a column": of_fp8(1, 1, torch.float8_e4m3fn, 1, 0),
    "E5M2 in groups": of_fp8(1040, 32, torch.float8_e5m2, 1, 0),
    "NVFP4": of_fp4(2080, 16),
    "MXFP4, a partial group": of_fp4(1042, 32),
    "int4": of_packed(1184, 128, 4, "one"),
    "int4, odd columns": of_packed(1185, 37, 4, "one"),
    "int4, zero points": of_packed(3001, 64, 4, "each"),
    "int4, groups of 17": of_packed(204, 17, 4, "each"),
    "int8 in words": of_packed(1030, 1030, 8, "none"),
    "int8 in words, zero points": of_packed(77, 10, 8, "of columns"),
    "int8": of_int8(515, 100),
    "int8, one scale": of_one_scale(100),
    "MLX, 4 bits": of_affine(1088, 64, 4),
    "MLX, 8 bits": of_affine(256, 32, 8),
    "NF4": of_nf4(4096, 64, 0),
    "NF4, from within a block, an odd number": of_nf4(1999, 64, 30),
    "MXFP8": of_exponents(1056, 32),
    "FP4, scales of a table": of_scale_table(1072, 16),
    "AWQ": of_awq(1030, 128),
    "AWQ, fewer inputs than a word": of_awq(3, 128),
    "AWQ, whole tiles": of_awq(384, 128, num_words=32),
    "AWQ, parts of tiles, small groups": of_awq(288, 32, num_words=16),
    "GPTQ, whole tiles": of_gptq(384, 128, 256),
    "GPTQ, parts of tiles, small groups": of_gptq(160, 32, 144),
    "GPTQ, a group of all": of_gptq(352, 352, 16),
    "GPTQ, a partial group": of_gptq(416, 128, 32),
    "GPTQ, odd rows": of_gptq(128, 128, 21),
    "GPTQ, odd groups": of_gptq(144, 48, 16),
    "GPTQ, 8 bits": of_gptq(128, 32, 32, bits=8),
    **{f"GGUF {kind.name}": of_gguf(kind) for kind in GGUF_TYPES.values() if kind.block_elements > 1},
}
SIZES = [(1, 1), (7, 16), (16, 130), (33, 31), (64, 96), (70, 45)]


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_a_matrix_is_transposed(size: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = torch.randn(size).to(dtype)
    out = torch.zeros(size[::-1], dtype=dtype)
    assert grouped_codes.transpose(out, matrix)
    assert torch.equal(out, matrix.t())
    wide = torch.zeros(size[1], size[0] + 3, dtype=dtype)
    assert grouped_codes.transpose(wide[:, 1:-2], matrix)
    assert torch.equal(wide[:, 1:-2], matrix.t())
    assert not wide[:, 0].any()
    assert not wide[:, -2:].any()
    assert not grouped_codes.transpose(out[:, 1:], matrix)
    assert not grouped_codes.transpose(out, matrix.double())


@pytest.mark.parametrize("skipped", [0, 5])
@pytest.mark.parametrize(("num_rows", "columns"), [(32, 32), (64, 96), (96, 288), (384, 128), (416, 224)])
def test_codes_become_columns(num_rows: int, columns: int, skipped: int) -> None:
    """Where a row of the result is whole lines of the cache, and where it is not; whole tiles, and parts of them."""
    codes, scales = octets(num_rows, columns // 2), octets(num_rows, columns // 32) // 2 + 50
    memory = torch.zeros(columns, num_rows + skipped, dtype=torch.bfloat16)
    out = memory[:, skipped:]
    assert fp4.write_fp4_transposed(out, codes, scales, e8m0_numbers())
    expected = fp4.dequantise_fp4(codes, scales, 32, scale_table=e8m0_numbers())
    assert torch.equal(bits(out), bits(expected.bfloat16().t()))
    assert not memory[:, :skipped].any()


@pytest.mark.parametrize(
    "reason", ["a small scale", "a large scale", "not a number", "float32", "odd rows", "odd columns"]
)
def test_codes_that_become_no_columns_at_once(reason: str) -> None:
    num_rows, columns = 32 + (reason == "odd rows"), 64 + 2 * (reason == "odd columns")
    codes, scales = octets(num_rows, columns // 2), torch.full((num_rows, columns // 32), 120, dtype=torch.uint8)
    scales[3, 1] = {"a small scale": 6, "a large scale": 248, "not a number": 255}.get(reason, 120)
    out = torch.zeros(columns, num_rows, dtype=torch.float32 if reason == "float32" else torch.bfloat16)
    assert not fp4.write_fp4_transposed(out, codes, scales, e8m0_numbers())
    assert not out.any()


@pytest.mark.parametrize("is_awq", [False, True])
@pytest.mark.parametrize("reason", ["", "float32", "rows", "inputs", "groups", "scales", "zero points", "words"])
def test_what_is_decoded_by_inputs_in_one_pass(reason: str, is_awq: bool) -> None:
    num_rows, num_inputs, group = 128 + 8 * (reason == "rows"), 128 + 16 * (reason == "inputs"), 64
    group = 16 if reason == "groups" else group
    grid = torch.ones(num_rows, -(-num_inputs // group))
    zeros = grid.half() if reason == "zero points" else grid
    words = octets(num_inputs, num_rows // 2) if is_awq else octets(num_inputs // 8, 4 * num_rows)
    words = words.view(torch.int32)
    own = slice(0, words.shape[1] - (reason == "words"))
    out = torch.zeros(num_rows, num_inputs, dtype=torch.float32 if reason == "float32" else torch.bfloat16)
    own_scales = grid[:, :1] if reason == "scales" else grid
    own_zeros = zeros[:, :1] if reason == "scales" else zeros
    written = grouped_codes.decode_by_inputs(out, words, own, own_scales, own_zeros, group, is_awq=is_awq)
    assert written == (not reason)
    assert bool(out.any()) == written


@pytest.mark.parametrize(("num_rows", "columns"), SIZES)
@pytest.mark.parametrize("skipped", [0, 1])
def test_words_become_rows(num_rows: int, columns: int, skipped: int) -> None:
    words = torch.randint(-(2**31), 2**31, (num_rows, skipped + columns), dtype=torch.int32)
    own = slice(skipped, skipped + columns)
    turned = grouped_codes.turn_words(words, own)
    assert turned is not None
    assert torch.equal(turned, words[:, own].t())
    nibbles = grouped_codes.turn_words(words, own, is_awq=True)
    assert nibbles is not None
    assert torch.equal(integers.unpack_bits(nibbles, 4, num_rows), integers.unpack_awq(words[:, own]))
    assert not integers.unpack_bits(nibbles, 4, 8 * nibbles.shape[1])[:, num_rows:].any()  # what fills the last words


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


@pytest.mark.parametrize("is_high_first", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize(("width", "num_octets"), [(1, 1), (1, 37), (3, 9), (16, 16), (16, 64), (32, 96), (64, 128)])
def test_fields_of_bytes_are_unpacked(
    width: int, num_octets: int, bits: int, is_high_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = octets(7, num_octets + 5)[:, 2 : 2 + num_octets]  # rows have other bytes between them
    unpacked = grouped_codes.unpack_fields(stored, bits, width, is_high_first=is_high_first)
    assert unpacked is not None
    groups = stored.reshape(7, -1, width)
    fields = [groups >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    assert torch.equal(unpacked, torch.stack(fields[::-1] if is_high_first else fields, dim=2).view(7, -1))
    monkeypatch.setattr(bit_fields, "unpack_fields", lambda *args, **options: None)
    assert torch.equal(unpacked, bit_fields.fields(stored, bits, width, is_high_first=is_high_first))
