"""The machine that a figure was measured on, and its limits, measured in the same run."""

from __future__ import annotations

import gc
import importlib.metadata
import platform
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from kernels.cgroup import available_cpus

__all__ = ["describe", "measure_limits", "median_seconds", "release_memory", "synchronize"]

_PACKAGES = ("torch", "triton", "transformers", "flash-attn", "numpy")


def describe(device: torch.device) -> dict[str, Any]:
    """Return the processor, the GPU if there is one, and the versions of the computing packages."""
    description: dict[str, Any] = {
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": available_cpus(),
        "device": str(device),
        "versions": {name: _version(name) for name in _PACKAGES},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        description["gpu"] = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return description


def measure_limits(device: torch.device, *, copy_bytes: int, matmul_size: int) -> dict[str, float]:
    """Return the bandwidth of a copy (bytes read and written, GB/s) and the rate of a bf16 product (TFLOP/s)."""
    source = torch.randint(0, 255, (copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = median_seconds(lambda: target.copy_(source), device)
    # Random, not zeros: a GPU multiplies zeros faster than weights.
    left, right = (torch.randn(matmul_size, matmul_size, dtype=torch.bfloat16, device=device) for _ in range(2))
    matmul = median_seconds(lambda: left @ right, device)
    return {"copy_gb_s": 2 * copy_bytes / copy / 1e9, "bf16_tflop_s": 2 * matmul_size**3 / matmul / 1e12}


def median_seconds(run: Callable[[], object], device: torch.device, *, warmup: int = 3, repeats: int = 10) -> float:
    """Return the median time of ``run``, each call synchronized."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        synchronize(device)
        started = perf_counter()
        run()
        synchronize(device)
        times.append(perf_counter() - started)
    return statistics.median(times)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Return the memory of deleted tensors to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """Return the first processor's name, with the family and model by which two of one name can be told apart."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            fields = [line.partition(":") for line in file.read().split("\n\n")[0].splitlines()]
    except OSError:
        fields = []
    first = {key.strip(): value.strip() for key, _, value in fields}
    name = first.get("model name", platform.processor())
    return f"{name}, family {first['cpu family']}, model {first['model']}" if "cpu family" in first else name
