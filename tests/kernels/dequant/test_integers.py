"""Packed integers of all sizes, and all codes with all zero points."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.dequant.integers import (
    dequantise_affine,
    dequantise_groups,
    dequantise_ordered,
    unpack_awq,
    unpack_bits,
    unpack_floats,
)


def packed(rows: list[list[int]], bits: int) -> torch.Tensor:
    """Return rows of integers in int32 words: each row is one long number."""
    words = []
    for row in rows:
        number = sum(code << bits * index for index, code in enumerate(row))
        size = -(-len(row) * bits // 32)
        content = number.to_bytes(4 * size, "little")
        words.append([int.from_bytes(content[4 * i : 4 * i + 4], "little", signed=True) for i in range(size)])
    return torch.tensor(words, dtype=torch.int32)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 32, 45])
def test_integers_come_out_as_they_were_packed(bits: int, count: int) -> None:
    rng = random.Random(bits * count)
    rows = [[rng.randrange(1 << bits) for _ in range(count)] for _ in range(5)]
    assert unpack_bits(packed(rows, bits), bits, count).tolist() == rows
    floats = unpack_floats(packed(rows, bits), bits, count)
    assert floats.dtype == torch.float32
    assert floats.tolist() == rows


def test_every_nibble_of_an_awq_word_is_one_column() -> None:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    for nibble, column in enumerate(order):
        for code in range(16):
            word = code << 4 * nibble
            word -= 1 << 32 if word >= 1 << 31 else 0
            expected = [code if index == column else 0 for index in range(8)]
            assert unpack_awq(torch.tensor([[word]], dtype=torch.int32)).view(-1).tolist() == expected


@pytest.mark.parametrize("scale", [1.0, 0.1, 1e-30])
def test_all_codes_with_all_zero_points(scale: float) -> None:
    codes = torch.arange(256).repeat(256, 1)
    zeros = torch.arange(256).view(256, 1)
    expected = (codes - zeros).float() * torch.tensor(scale)
    scales = torch.full((256, 1), scale)
    assert torch.equal(dequantise_groups(codes, scales, zeros, 256), expected)
    assert torch.equal(dequantise_ordered(codes, scales, zeros, torch.zeros(256).long()), expected)
    for zero in (0, 8, 128):
        assert torch.equal(dequantise_groups(codes[:1], scales[:1], zero, 256), (codes[:1] - zero).float() * scales[:1])


@pytest.mark.parametrize("columns", [12, 10])  # whole groups of 4, and a smaller last one
def test_each_group_has_its_own_scale_and_zero_point(columns: int) -> None:
    scales, zeros = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]), torch.tensor([[1, 2, 3], [4, 5, 6]])
    codes = torch.arange(2 * columns).view(2, columns)
    group_of = torch.arange(columns) // 4
    expected = (codes - zeros[:, group_of]).float() * scales[:, group_of]
    assert torch.equal(dequantise_groups(codes, scales, zeros, 4), expected)
    assert torch.equal(dequantise_ordered(codes, scales, zeros, group_of), expected)
    affine = codes.float() * scales[:, group_of] + zeros[:, group_of]
    assert torch.equal(dequantise_affine(codes, scales, zeros, 4), affine)
