"""Copies between the host and a device that do not stop the host; on a CPU nothing is copied.

A GPU works through a queue. A copy from ordinary memory makes the host wait until the queue is empty, and so does a
copy whose result is read at once. The GPU then idles while the host prepares what comes next. Here arrays go to the
device through pinned memory. Copies to the host are only started, and one ``wait_for_device`` makes all of them
readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

__all__ = [
    "host_words",
    "start_to_host",
    "timing_event",
    "to_device",
    "to_device_together",
    "use_device",
    "wait_for_device",
]

_WORD_BYTES = 8  # of the widest dtype that is copied together with others


def use_device(device: torch.device) -> None:
    """Make a GPU the calling thread's current device: each thread has its own, and Triton launches there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def to_device(values: object, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    """Return a list or an array as a tensor on ``device``; None for ``dtype`` keeps the array's own.

    On a CPU the tensor may share the array's memory.
    """
    on_host = torch.as_tensor(values, dtype=dtype)
    # torch keeps the pinned memory until the copy is done.
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host


def host_words(count: int, device: torch.device) -> torch.Tensor:
    """Return memory to be copied to ``device``, int64 [count]; torch keeps it until the copy is done."""
    return torch.empty(count, dtype=torch.int64, pin_memory=device.type == "cuda")


def to_device_together(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Return arrays as tensors on ``device``, copied there at once; each is one-dimensional and contiguous.

    On a GPU the tensors are parts of one piece of memory, aligned to 8 bytes. On a CPU they share the arrays' memory.
    """
    on_host = [torch.from_numpy(array) for array in arrays]
    if device.type != "cuda":
        return on_host
    sizes = [-(-array.nbytes // _WORD_BYTES) for array in arrays]
    slab = host_words(sum(sizes), device)
    words, start = slab.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        words[start : start + size].view(array.dtype)[: len(array)] = array
        start += size
    parts = torch.split(slab.to(device, non_blocking=True), sizes)
    return [part.view(tensor.dtype)[: len(tensor)] for part, tensor in zip(parts, on_host, strict=True)]


def start_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start to copy a tensor to the host; the result may be read after ``wait_for_device``. On a CPU: the same one."""
    return tensor.to("cpu", non_blocking=True)  # torch allocates pinned memory for such a copy


def timing_event() -> torch.cuda.Event:
    """Return an event with a time, for which the host waits asleep: else the wait would take a whole core."""
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


def wait_for_device(device: torch.device, event: torch.cuda.Event | None = None) -> None:
    """Wait until ``device`` has done all that this thread has queued on its current stream, or before an event."""
    if event is not None:
        event.synchronize()
    elif device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
