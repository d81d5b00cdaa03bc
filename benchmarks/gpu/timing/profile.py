"""Profiles steps of an engine with torch.profiler: what runs on the GPU, and what the host calls."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu.timing.kernel_groups import RANGE_PREFIX, SAMPLING, KernelTime
from engine.engine import Engine

__all__ = ["StepProfile", "profile_steps"]

MODULE_GROUPS = {
    "Norm": "norm",
    "Linear": "linear",
    "Embedding": "embedding",
    "MLP": "activation",
    "Attention": "rotary",
}


@dataclass(frozen=True)
class StepProfile:
    """What some steps did.

    Attributes:
        kernels: kernels and copies on the GPU.
        host_calls: how often the host called each function of CUDA, such as cudaLaunchKernel.
    """

    kernels: list[KernelTime]
    host_calls: dict[str, int]


def profile_steps(engine: Engine, num_steps: int) -> StepProfile:
    """Run steps under the profiler."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with _ranges(engine), profile(activities=activities) as profiler:
        for _ in range(num_steps):
            engine.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return _read(profiler.events())


def _read(events: Any) -> StepProfile:
    """Split the profiler's events into those of the GPU and calls of the host."""
    ranges = _ranges_of_launches(events)
    kernels, calls = [], Counter[str]()
    for event in events:
        if event.device_type == torch.profiler.DeviceType.CUDA:
            if not (event.name.startswith(RANGE_PREFIX) or getattr(event, "is_user_annotation", False)):
                start, end = event.time_range.start, event.time_range.end
                launched_in = ranges[event.name, end - start]
                kernels.append(KernelTime(event.name, start, end, launched_in.pop() if launched_in else None))
        elif event.name.startswith("cu"):
            calls[event.name] += 1
    return StepProfile(kernels, dict(calls))


def _ranges_of_launches(events: Any) -> defaultdict[tuple[str, float], list[str | None]]:
    """Return the ranges that launched the executions of a kernel, by its name and their duration.

    The profiler lists an execution's name and duration with the operator that launched it. Executions that agree in
    both are interchangeable in a sum of times.
    """
    ranges: defaultdict[tuple[str, float], list[str | None]] = defaultdict(list)
    for event in events:
        for kernel in getattr(event, "kernels", ()):
            ranges[kernel.name, kernel.duration].append(_enclosing_range(event))
    return ranges


def _enclosing_range(event: Any) -> str | None:
    while event is not None:
        if event.name.startswith(RANGE_PREFIX):
            return str(event.name.removeprefix(RANGE_PREFIX))
        event = event.cpu_parent
    return None


@contextmanager
def _ranges(engine: Engine) -> Iterator[None]:
    """Name what the model's modules and the sampler do for as long as the block runs."""
    runner: Any = engine.runner
    with ExitStack() as stack:
        sampler = type(runner.sampler)
        for name, method in vars(sampler).items():
            if callable(method) and not name.startswith("_"):
                stack.enter_context(patch.object(sampler, name, _in_range(SAMPLING, method)))
        model = runner.workers.local.shard.model
        for module in model.modules() if isinstance(model, nn.Module) else ():
            if group := next((group for part, group in MODULE_GROUPS.items() if part in type(module).__name__), None):
                stack.enter_context(patch.object(module, "forward", _in_range(group, module.forward)))
        yield


def _in_range(group: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        with record_function(f"{RANGE_PREFIX}{group}"):
            return function(*arguments, **named)

    return run
