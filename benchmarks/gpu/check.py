"""Check everything that needs a GPU, in one run of under five minutes, and write one JSON.

    python -m benchmarks.gpu.check --out result.json          # full sizes on a GPU, tiny ones on a CPU
    python -m benchmarks.gpu.check --size tiny --out r.json   # tiny everywhere

It needs torch, triton, transformers and what the engine imports; no Ray, no network, no checkpoint: models have random
weights. flash-attn is checked where it is installed. On a CPU the same code runs with the CPU's kernels, which shows
that the script works, not that the GPU's kernels do. It exits with 1 if any check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu.kernel_checks import check_attention, check_store_kvcache, time_decode_attention
from benchmarks.gpu.model_checks import check_tokens, measure_throughput
from benchmarks.gpu.sizes import FULL, TINY, Sizes
from benchmarks.machine import describe, measure_limits

__all__ = ["main", "run_checks"]


def run_checks(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Run every part; a part that fails does not stop the others."""
    limits: dict[str, float] = {}

    def limits_part() -> dict[str, float]:
        limits.update(measure_limits(device, copy_bytes=sizes.copy_bytes, matmul_size=sizes.matmul_size))
        return limits

    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "limits": limits_part,
        "store_kvcache": lambda: check_store_kvcache(device),
        "attention": lambda: check_attention(device),
        "decode_attention": lambda: time_decode_attention(device, sizes, limits),
        "tokens": lambda: check_tokens(device),
        "throughput": lambda: measure_throughput(device, sizes, limits),
    }
    result: dict[str, Any] = {"machine": describe(device), "sizes": asdict(sizes), "passed": True, "seconds": {}}
    for name, part in parts.items():
        started = perf_counter()
        try:
            result[name] = part()
        except Exception:
            result[name] = {"passed": False, "error": traceback.format_exc(limit=-6)}
        result["seconds"][name] = round(perf_counter() - started, 2)
        result["passed"] &= result[name].get("passed", True)
        print(f"{name}: {json.dumps(result[name], default=str)[:2000]}", flush=True)
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Check what needs a GPU.")
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=("auto", "full", "tiny"), default="auto")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    full = options.size == "full" or (options.size == "auto" and device.type == "cuda")
    result = run_checks(device, FULL if full else TINY)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("passed" if result["passed"] else "FAILED", "in", round(sum(result["seconds"].values()), 1), "s")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
