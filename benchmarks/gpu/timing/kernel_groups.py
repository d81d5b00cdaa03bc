"""Sums the GPU's time by what a kernel is for: attention, linears, norms, sampling and so on.

A kernel's group follows from its name where that says it, else from the range of the step that launched it: elementwise
kernels of torch have the same names wherever they come from. This module imports no torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["RANGE_PREFIX", "KernelTime", "busy_us", "group_of", "table"]

RANGE_PREFIX = "step: "  # of ranges that name a group
SAMPLING = "sampling"
NAMES = {  # patterns in the names of kernels, the first that matches counts
    "rotary": r"rotary|rope|rotate",
    "store_kvcache": r"store_kernel|store_kvcache",
    "attention": r"prefill_kernel|split_decode|_splits_kernel|flash|fmha|attention|^(index_scores|choose|sparse)_k",
    "experts": r"route_kernel|group_kernel|grouped_linear|combine_kernel",
    "recurrent": r"^(conv_(sequence|other_tokens)|(delta_rule|scan)(_chunks)?|row_decays_chunks|carry_states)_kernel",
    "linear": r"linear_kernel|add_parts_kernel|gemm|gemv|nvjet|cutlass|xmma|cublas|splitk",
    "copies": r"memcpy|memset",
    "activation": r"gated_activation",
    "norm": r"norm|rms",
    SAMPLING: r"best_of_|group_maxima|truncated_draw|argmax|topk|sort|multinomial|sample|penalt",
}
OTHER = "other"
SHOWN = 30  # kernels that the table lists


@dataclass(frozen=True)
class KernelTime:
    """One execution of a kernel or a copy on the GPU.

    Attributes:
        name: of the kernel.
        start_us, end_us: on the profiler's clock.
        range: the group of the range that launched it, if known.
    """

    name: str
    start_us: float
    end_us: float
    range: str | None = None


def group_of(kernel: KernelTime) -> str:
    """Return the group. What the sampler launches is sampling, whatever it is."""
    if kernel.range == SAMPLING:
        return SAMPLING
    for group, pattern in NAMES.items():
        if re.search(pattern, kernel.name, re.IGNORECASE):
            return group
    return kernel.range or OTHER


def table(kernels: Iterable[KernelTime], num_steps: int) -> dict[str, Any]:
    """Return milliseconds and launches of a step, by group and for the kernels that take longest."""
    groups: dict[str, list[float]] = defaultdict(list)
    names: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel in kernels:
        group = group_of(kernel)
        groups[group].append(kernel.end_us - kernel.start_us)
        names[group, kernel.name].append(kernel.end_us - kernel.start_us)
    longest = sorted(names.items(), key=lambda entry: -sum(entry[1]))[:SHOWN]
    return {
        "groups": {group: _per_step(times, num_steps) for group, times in sorted(groups.items(), key=_total)},
        "kernels": [
            {"name": name[:120], "group": group} | _per_step(times, num_steps) for (group, name), times in longest
        ],
    }


def _total(entry: tuple[str, list[float]]) -> float:
    return -sum(entry[1])


def _per_step(times_us: list[float], num_steps: int) -> dict[str, float]:
    return {"milliseconds": sum(times_us) / num_steps / 1e3, "launches": len(times_us) / num_steps}


def busy_us(kernels: Iterable[KernelTime]) -> float:
    """Return the time in which at least one kernel runs."""
    busy, end = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda item: item.start_us):
        busy += max(0.0, kernel.end_us - max(kernel.start_us, end))
        end = max(end, kernel.end_us)
    return busy
