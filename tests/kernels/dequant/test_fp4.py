"""FP4 codes: all 256 bytes, with all exponents and with scales of every kind."""

from __future__ import annotations

import torch

from kernels.dequant.fp4 import dequantise_fp4
from kernels.dequant.scales import e8m0_to_float
from tests.kernels.dequant.test_fp8 import bits

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1(code: int) -> float:
    return -MAGNITUDES[code & 7] if code & 8 else MAGNITUDES[code]


def test_all_bytes_with_all_exponents() -> None:
    octets = torch.arange(256, dtype=torch.uint8).expand(256, 256)
    values = dequantise_fp4(octets, e8m0_to_float(torch.arange(256, dtype=torch.uint8).view(-1, 1)), 512)
    row = torch.tensor([e2m1(code) for octet in range(256) for code in (octet & 15, octet >> 4)])
    for exponent in range(255):
        assert bits(values[exponent]) == bits(row * torch.tensor(2.0 ** (exponent - 127))), exponent
    assert values[255].isnan().all()


def test_each_group_has_its_own_scale() -> None:
    octets = torch.full((3, 32), 0x21, dtype=torch.uint8)  # 0.5, 1.0
    scales = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [0.1, 0.2, 0.3, 0.4]])
    expected = torch.tensor([0.5, 1.0]).repeat(32) * scales.repeat_interleave(16, 1)
    assert torch.equal(dequantise_fp4(octets, scales, 16), expected)
