"""store_kvcache on the device against its reference, bit by bit."""

from __future__ import annotations

from itertools import product

import torch

from benchmarks.gpu.part_run import PartRun
from kernels.cache import reference
from kernels.cache.store_kvcache import store_kvcache

__all__ = ["run"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def run(part: PartRun) -> None:
    """Write random tokens to random slots, some skipped, from strided views; every element must equal the reference."""
    cases = 0
    for dtype, head_dim, num_tokens in product(DTYPES, (16, 80, 128), (1, 7, 500)):
        if not _is_equal(part.device, dtype, head_dim, num_tokens, seed=cases):
            part.fault(f"{dtype}, head_dim {head_dim}, {num_tokens} tokens: the caches differ")
        cases += 1
    part.record("cases", cases)


def _is_equal(device: torch.device, dtype: torch.dtype, head_dim: int, num_tokens: int, *, seed: int) -> bool:
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(num_tokens, 6, head_dim, generator=generator).to(device, dtype)
    key, value = fused[:, 2:4], fused[:, 4:6]
    slots = torch.randperm(2 * num_tokens, generator=generator)[:num_tokens]
    slots[::5] = -1
    caches = [torch.randn(num_tokens, 2, 2, head_dim, generator=generator).to(device, dtype) for _ in "kv"]
    expected = [cache.clone() for cache in caches]
    store_kvcache(key, value, caches[0], caches[1], slots.to(device))
    reference.store_kvcache(key, value, expected[0], expected[1], slots.to(device))
    return all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))
