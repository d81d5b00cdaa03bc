"""Kernels that only convert, to test the conversions."""

from __future__ import annotations

import torch
import triton
from triton import language as tl

from kernels.cache.triton.fp8 import decode_fp8, encode_fp8

__all__ = ["decode", "encode"]

_BLOCK = 1024


@triton.jit
def _encode_kernel(codes, numbers, inverse_scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes + index, encode_fp8(tl.load(numbers + index), inverse_scale))


@triton.jit
def _decode_kernel(low, high, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low_numbers, high_numbers = decode_fp8(tl.load(words + index), low.dtype.element_ty)
    tl.store(low + index, low_numbers)
    tl.store(high + index, high_numbers)


def encode(numbers: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the codes of a multiple of 1024 numbers, uint8."""
    codes = torch.empty(len(numbers), dtype=torch.uint8, device=numbers.device)
    _encode_kernel[(len(numbers) // _BLOCK,)](codes, numbers, 1.0 / scale, BLOCK=_BLOCK)
    return codes


def decode(words: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers in the low and the high bytes of a multiple of 1024 words."""
    low, high = torch.empty(2, len(words), dtype=dtype, device=words.device)
    _decode_kernel[(len(words) // _BLOCK,)](low, high, words, BLOCK=_BLOCK)
    return low, high
