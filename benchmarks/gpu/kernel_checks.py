"""The kernels on the device against their float64 references, and decode attention against the copy bandwidth."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from benchmarks.gpu.sizes import Sizes
from benchmarks.machine import median_seconds
from kernels import reference
from kernels.attention.base import AttentionBackend
from kernels.attention.registry import BACKENDS
from kernels.attention.select import select_backend
from kernels.store_kvcache import store_kvcache
from tests.kernels.attention.paged_batches import BATCHES, SHAPES, TOLERANCES, Shape, make_batch

__all__ = ["check_attention", "check_store_kvcache", "time_decode_attention"]


def check_store_kvcache(device: torch.device) -> dict[str, Any]:
    """Write random tokens to random slots, some skipped, from strided views; every element must equal the reference."""
    cases = 0
    for dtype, head_dim, num_tokens in product(TOLERANCES, (16, 80, 128), (1, 7, 500)):
        generator = torch.Generator().manual_seed(cases)
        fused = torch.randn(num_tokens, 6, head_dim, generator=generator).to(device, dtype)
        key, value = fused[:, 2:4], fused[:, 4:6]
        slots = torch.randperm(2 * num_tokens, generator=generator)[:num_tokens]
        slots[::5] = -1
        caches = [torch.randn(num_tokens, 2, 2, head_dim, generator=generator).to(device, dtype) for _ in "kv"]
        expected = [cache.clone() for cache in caches]
        store_kvcache(key, value, caches[0], caches[1], slots.to(device))
        reference.store_kvcache(key, value, expected[0], expected[1], slots.to(device))
        if not all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True)):
            return {"passed": False, "case": f"{dtype}, head_dim {head_dim}, {num_tokens} tokens"}
        cases += 1
    return {"passed": True, "cases": cases}


def check_attention(device: torch.device) -> dict[str, Any]:
    """Compare every backend that this machine has, over batches, shapes, windows and dtypes."""
    results = {name: _check_backend(backend, device) for name, backend in _backends(device).items()}
    passed = bool(results) and all(result["passed"] for result in results.values())
    return {"passed": passed, **results}


def _backends(device: torch.device) -> dict[str, AttentionBackend]:
    backends = {}
    for name in (name for name, entry in BACKENDS.items() if device.type in entry.devices):
        try:
            backends[name] = select_backend(device, torch.bfloat16, name)
        except ValueError as error:
            print(f"attention backend left out: {error}")
    return backends


def _check_backend(backend: AttentionBackend, device: torch.device) -> dict[str, Any]:
    """Return the worst error by dtype, as a share of the tolerance, and the cases that exceeded it."""
    worst: dict[str, float] = {}
    failed: list[str] = []
    cases = 0
    dtypes = [dtype for dtype in TOLERANCES if str(dtype).removeprefix("torch.") in BACKENDS[backend.name].dtypes]
    for dtype, (shape_name, shape), (name, lengths) in product(dtypes, SHAPES.items(), BATCHES.items()):
        block_size = _block_size(backend, shape)
        for window in (None, 5, 100):
            batch = make_batch(lengths, _with(shape, dtype, block_size), seed=cases, device=device)
            error = _error(batch.run(backend, window), batch.expected(window))
            worst[str(dtype)] = max(worst.get(str(dtype), 0.0), error)
            cases += 1
            if not error <= 1.0:
                failed.append(f"{dtype}, {shape_name}, {name}, window {window}: {error:.2f} x tolerance")
    return {"passed": not failed, "cases": cases, "worst_share_of_tolerance": worst, "failed": failed[:10]}


def _block_size(backend: AttentionBackend, shape: Shape) -> int:
    """Return the shape's block size, or the backend's default if it cannot read blocks of that size."""
    try:
        backend.check_block_size(shape.block_size)
    except ValueError:
        return backend.default_block_size
    return shape.block_size


def _with(shape: Shape, dtype: torch.dtype, block_size: int) -> Shape:
    return Shape(shape.num_heads, shape.num_kv_heads, shape.head_dim, block_size, dtype)


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error relative to what the dtype's tolerance allows; NaN counts as infinite."""
    absolute, relative = TOLERANCES[expected.dtype]
    allowed = absolute + relative * expected.double().abs()
    error = ((actual.double() - expected.double()).abs() / allowed).max().item()
    return error if error == error else float("inf")


def time_decode_attention(device: torch.device, sizes: Sizes, limits: dict[str, float]) -> dict[str, Any]:
    """Time one layer's decode attention; its floor is the bytes of K and V at the measured copy bandwidth."""
    results: dict[str, Any] = {}
    for name, backend in _backends(device).items():
        shape = Shape(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, backend.default_block_size, torch.bfloat16)
        for num_seqs in sizes.batches:
            batch = make_batch([(1, sizes.attention_context)] * num_seqs, shape, device=device)
            seconds = median_seconds(lambda batch=batch, backend=backend: batch.run(backend), device)  # type: ignore[misc]
            kv_bytes = 2 * 2 * num_seqs * sizes.attention_context * sizes.num_kv_heads * sizes.head_dim
            floor = kv_bytes / (limits["copy_gb_s"] * 1e9)
            results[f"{name}, {num_seqs} x {sizes.attention_context}"] = {
                "milliseconds": seconds * 1e3,
                "share_of_copy_bandwidth": floor / seconds,
            }
    return results
