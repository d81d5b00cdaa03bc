"""The attention backends that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.run.part_run import PartRun
from kernels.attention.base import AttentionBackend
from kernels.attention.registry import BACKENDS
from kernels.attention.select import select_backend

__all__ = ["block_size_for", "cache_kinds", "has_dtype", "usable_backends"]


def usable_backends(part: PartRun) -> Iterator[AttentionBackend]:
    """Yield each backend for bfloat16 on the part's device; record why others are left out."""
    left_out: dict[str, str] = {}
    num_usable = 0
    for name, entry in BACKENDS.items():
        if part.device.type not in entry.devices:
            continue
        try:
            backend = select_backend(part.device, torch.bfloat16, name)
        except ValueError as error:
            left_out[name] = str(error)
            continue
        num_usable += 1
        yield backend
    part.record("left_out", left_out)
    if not num_usable:
        part.fault("no attention backend can run here")


def has_dtype(backend: AttentionBackend, dtype: torch.dtype) -> bool:
    """Whether the backend computes the dtype."""
    return str(dtype).removeprefix("torch.") in BACKENDS[backend.name].dtypes


def cache_kinds(backend: AttentionBackend) -> tuple[bool, ...]:
    """Return the kinds of caches that the backend reads: whether they are FP8."""
    return (False, True) if "fp8" in BACKENDS[backend.name].options else (False,)


def block_size_for(backend: AttentionBackend, wanted: int) -> int:
    """Return ``wanted``, or the backend's default if it cannot read blocks of that size."""
    try:
        backend.check_block_size(wanted)
    except ValueError:
        return backend.default_block_size
    return wanted
