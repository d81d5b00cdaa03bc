"""Copies between the host and a device that do not stop the host; on a CPU nothing is copied.

A GPU works through a queue. A copy from ordinary memory, and one whose result is read at once, make the host wait until
the queue is empty, so that the GPU idles while the host prepares what comes next. Here arrays go to the device through
pinned memory. Copies to the host are only started, and one ``wait_for_device`` makes all of them readable.
"""

from __future__ import annotations

import torch

__all__ = ["start_to_host", "to_device", "use_device", "wait_for_device"]


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


def start_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start to copy a tensor to the host; the result may be read after ``wait_for_device``. On a CPU: the same one."""
    return tensor.to("cpu", non_blocking=True)  # torch allocates pinned memory for such a copy


def wait_for_device(device: torch.device) -> None:
    """Wait until ``device`` has done everything that this thread has queued on its current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
