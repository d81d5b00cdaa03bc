"""Keys and values in FP8 (E4M3: 4 bits of exponent, 3 of mantissa): what the cache holds, as plainly as torch allows.

The Triton kernels of kernels/cache/triton/fp8.py compute the same on integers, so they need no instructions for FP8.
"""

from __future__ import annotations

import torch

__all__ = ["FP8", "LARGEST", "from_fp8", "to_fp8"]

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def to_fp8(numbers: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return the FP8 number nearest to each of ``numbers / scale``, to the even one of two.

    Numbers beyond LARGEST become LARGEST of their sign, and so do infinities. NaN becomes LARGEST of either sign: the
    cache holds no NaN.
    """
    scaled = numbers.float() * (1.0 / scale)
    return scaled.clamp(-LARGEST, LARGEST).nan_to_num(LARGEST).to(FP8)


def from_fp8(codes: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return the numbers that ``to_fp8`` has stored, in float32."""
    return codes.float() * scale
