"""kernels/dequant/gguf.py against the package `gguf`, bit by bit: random blocks, extreme scales, every code."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kernels.coded_weight import CodedMatrix, decode
from kernels.dequant import gguf as ours
from kernels.dequant import gguf_k
from kernels.dequant.gguf import CODERS, FORMATS, coded_gguf, dequantise_gguf
from kernels.dequant.gguf_types import GGUF_TYPES

NUMBERS = sorted(GGUF_TYPES)
NUM_ROWS, BLOCKS_PER_ROW = 24, 3
EXTREME_HALVES = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00]


def stored_rows(number: int, seed: int = 0) -> np.ndarray:
    """Return rows of blocks: random bytes, one row for each value that all bytes of a block may have, and extremes."""
    kind = GGUF_TYPES[number]
    random = np.random.default_rng(seed)
    row_bytes = BLOCKS_PER_ROW * kind.block_bytes
    rows = random.integers(0, 256, (NUM_ROWS, row_bytes), dtype=np.uint8)
    uniform = np.repeat(np.arange(256, dtype=np.uint8)[:, None], row_bytes, axis=1)
    extreme = random.integers(0, 256, (len(EXTREME_HALVES) ** 2, BLOCKS_PER_ROW, kind.block_bytes), dtype=np.uint8)
    for row, (first, second) in zip(
        extreme, ((a, b) for a in EXTREME_HALVES for b in EXTREME_HALVES), strict=True
    ):  # float16 scales are first or last in the blocks
        halves = np.array([first, second], dtype="<u2").view(np.uint8)
        size = min(4, kind.block_bytes)
        row[0, :size], row[1, -size:], row[2, -2:] = halves[:size], halves[:size], halves[:2]
    return np.concatenate([rows, uniform, extreme.reshape(len(extreme), -1)])


def expected_of(rows: np.ndarray, number: int) -> np.ndarray:
    with np.errstate(all="ignore"):
        return dequantize(rows, GGMLQuantizationType(number)).astype(np.float32)


def equal_bits(ours: torch.Tensor, theirs: np.ndarray) -> bool:
    """Return whether all numbers have the same bits; NaNs only need to be in the same places."""
    ours_is_nan, theirs_is_nan = ours.isnan().numpy(), np.isnan(theirs)
    same = ours.contiguous().numpy().view(np.uint32) == np.ascontiguousarray(theirs).view(np.uint32)
    return ours.shape == theirs.shape and bool((ours_is_nan == theirs_is_nan).all() and (same | ours_is_nan).all())


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: GGUF_TYPES[number].name)
def test_equals_the_authority_bit_by_bit(number: int) -> None:
    kind = GGUF_TYPES[number]
    assert kind.name == GGMLQuantizationType(number).name
    assert (kind.block_elements, kind.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType(number)]
    rows = stored_rows(number)
    assert kind.row_bytes(BLOCKS_PER_ROW * kind.block_elements) == rows.shape[1]
    assert equal_bits(dequantise_gguf(torch.from_numpy(rows), kind), expected_of(rows, number))


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: GGUF_TYPES[number].name)
def test_no_rows_give_no_rows(number: int) -> None:
    kind = GGUF_TYPES[number]
    rows = torch.zeros(0, 2 * kind.block_bytes, dtype=torch.uint8)
    assert dequantise_gguf(rows, kind).shape == (0, 2 * kind.block_elements)


@pytest.mark.parametrize("number", [number for number in NUMBERS if GGUF_TYPES[number].name in CODERS])
def test_codes_of_rows_decode_to_the_authoritys_numbers(number: int) -> None:
    kind, rows = GGUF_TYPES[number], stored_rows(number)
    matrix = coded_gguf(torch.from_numpy(rows), kind)
    assert matrix.format == FORMATS[kind.name]
    assert equal_bits(decode(matrix), expected_of(rows, number))


def changed(matrix: CodedMatrix, **parts: torch.Tensor) -> CodedMatrix:
    return dataclasses.replace(matrix, **parts)


def shifted(matrix: CodedMatrix) -> CodedMatrix:
    return changed(matrix, codes=matrix.codes.roll(1, dims=1))


def negated_minima(matrix: CodedMatrix) -> CodedMatrix:
    assert matrix.outer_minima is not None
    return changed(matrix, outer_minima=-matrix.outer_minima)


def other_zero(matrix: CodedMatrix) -> CodedMatrix:
    return dataclasses.replace(matrix, format=dataclasses.replace(matrix.format, zero=matrix.format.zero - 1))


PLANTED = {
    "the codes' offset": (2, lambda blocks: other_zero(ours.q4_0(blocks))),
    "the minimum's sign": (3, lambda blocks: negated_minima(ours.q4_1(blocks))),
    "elements in another order": (8, lambda blocks: shifted(ours.q8_0(blocks))),
    "a third bit that subtracts": (11, lambda blocks: gguf_k.q3_k(torch.cat((~blocks[:, :32], blocks[:, 32:]), 1))),
    "scales and minima exchanged": (12, lambda blocks: gguf_k.q4_k(blocks[:, [2, 3, 0, 1, *range(4, 144)]])),
    "unsigned scales": (14, lambda blocks: gguf_k.q6_k(torch.cat((blocks[:, :192], blocks[:, 192:208] & 127,
                                                                  blocks[:, 208:]), 1))),
    "E8M0 without its subnormals": (39, lambda blocks: ours.mxfp4(torch.cat((blocks[:, :1].clamp(2), blocks[:, 1:]),
                                                                            1))),
}  # fmt: skip


@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_seen(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number, function = PLANTED[error]
    kind, rows = GGUF_TYPES[number], stored_rows(number)
    monkeypatch.setitem(CODERS, kind.name, function)
    assert not equal_bits(dequantise_gguf(torch.from_numpy(rows), kind), expected_of(rows, number))
