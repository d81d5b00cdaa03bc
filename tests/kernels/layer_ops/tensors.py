"""Random tensors and norms for the tests of a layer's operations, and how far a result may be from the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Relative and absolute. torch's operators round 16-bit numbers several times, kernels once.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class TestNorm:
    """An RMSNorm's weights."""

    __test__ = False

    weight: torch.Tensor
    eps: float = 1e-5
    adds_one: bool = False


class Random:
    """Numbers that depend on the order of the calls alone."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.dtype, self.device = dtype, device

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, self.dtype)

    def norm(self, width: int, *, adds_one: bool = False) -> TestNorm:
        return TestNorm(self(width), adds_one=adds_one)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
