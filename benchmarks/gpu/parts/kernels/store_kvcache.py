"""store_kvcache on the device against its reference, bit by bit."""

from __future__ import annotations

from itertools import product

import torch

from benchmarks.gpu.run.part_run import PartRun
from kernels.cache import reference
from kernels.cache.fp8 import to_fp8
from kernels.cache.store_kvcache import store_kvcache

__all__ = ["run"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCALES = 0.5, 1.7  # of caches in FP8


def run(part: PartRun) -> None:
    """Write random tokens to random slots, some skipped, from strided views; every element must equal the reference."""
    cases = 0
    for is_fp8, dtype, head_dim, num_tokens in product((False, True), DTYPES, (16, 80, 128), (1, 7, 500)):
        if not _is_equal(part.device, dtype, head_dim, num_tokens, is_fp8=is_fp8, seed=cases):
            fp8 = " in FP8" * is_fp8
            part.fault(f"{dtype}{fp8}, head_dim {head_dim}, {num_tokens} tokens: the caches differ")
        cases += 1
    part.record("cases", cases)


def _is_equal(
    device: torch.device, dtype: torch.dtype, head_dim: int, num_tokens: int, *, is_fp8: bool, seed: int
) -> bool:
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(num_tokens, 6, head_dim, generator=generator).to(device, dtype)
    key, value = fused[:, 2:4], fused[:, 4:6]
    slots = torch.randperm(2 * num_tokens, generator=generator)[:num_tokens]
    slots[::5] = -1
    caches = [torch.randn(num_tokens, 2, 2, head_dim, generator=generator).to(device, dtype) for _ in "kv"]
    if is_fp8:
        key, value = 300 * key, 300 * value  # some are beyond the largest number
        caches = [to_fp8(cache) for cache in caches]
    expected = [cache.clone() for cache in caches]
    store_kvcache(key, value, caches[0], caches[1], slots.to(device), *SCALES)
    reference.store_kvcache(key, value, expected[0], expected[1], slots.to(device), *SCALES)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(caches, expected, strict=True))
