"""HostMemory: pinned host memory, and asynchronous copies between it and the GPUs.

A copy to the host writes its data only when the host has waited for it; until then the memory holds a pattern that no
step produces. A copy from the host must find its source unchanged when the GPU reads it, at the latest at that wait.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.gpu_rehearsal.code_lines import caller_line

__all__ = ["HostMemory", "poison"]


@dataclass(frozen=True)
class _Copy:
    """A copy that the GPU may not have done yet."""

    host: torch.Tensor
    data: torch.Tensor  # what is copied
    to_host: bool
    line: str

    def overlaps(self, host: torch.Tensor) -> bool:
        start, end = _extent(self.host)
        other_start, other_end = _extent(host)
        return start < other_end and other_start < end


class HostMemory:
    """What CUDA knows about the host's memory.

    Attributes:
        num_registered: pieces of memory that cudaHostRegister has pinned.

    Args:
        on_fault: receives the description of a copy whose source changed too early.
    """

    def __init__(self, on_fault: Callable[[str], None]) -> None:
        self._on_fault = on_fault
        self._pinned: dict[int, int] = {}  # start: end
        self._starts: list[int] = []  # of them, ascending
        self.num_registered = 0  # by cudaHostRegister
        self._kept: list[torch.Tensor] = []  # torch's allocator keeps pinned memory, so no pageable tensor gets it
        self._pending: dict[int, deque[_Copy]] = defaultdict(deque)  # by device, oldest first
        self._num_started: dict[int, int] = defaultdict(int)  # copies ever started, by device

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Declare a new tensor's memory pinned, and return it."""
        self._kept.append(tensor)
        self._add(tensor.data_ptr(), tensor.nbytes)
        return tensor

    def _add(self, start: int, num_bytes: int) -> None:
        if num_bytes:
            if start not in self._pinned:
                insort(self._starts, start)
            self._pinned[start] = start + num_bytes

    def register(self, start: int, num_bytes: int) -> None:
        """cudaHostRegister."""
        self._add(start, num_bytes)
        self.num_registered += 1

    def unregister(self, start: int) -> bool:
        """cudaHostUnregister; False if the memory is not registered."""
        was_pinned = self._pinned.pop(start, None) is not None
        if was_pinned:
            self._starts.remove(start)
        self.num_registered -= was_pinned
        return was_pinned

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the whole tensor is in pinned memory, as an empty one is."""
        start, end = _extent(tensor)
        if start == end:
            return True
        index = bisect_right(self._starts, start) - 1  # of the only piece that may begin before the tensor and hold it
        return index >= 0 and end <= self._pinned[self._starts[index]]

    # --- copies -------------------------------------------------------------------------------------------------

    def read(self, device: int, host: torch.Tensor) -> torch.Tensor:
        """Start a copy of pinned memory to a device; return the data."""
        self._complete_earlier(device, host, to_host=True)
        data = host.clone()
        self._start(device, _Copy(host, data, False, caller_line()))
        return data

    def write(self, device: int, host: torch.Tensor, data: torch.Tensor) -> None:
        """Start a copy of a device's data to pinned memory."""
        self._complete_earlier(device, host, to_host=False)
        self._start(device, _Copy(host, data.clone(), True, caller_line()))
        poison(host)

    def _complete_earlier(self, device: int, host: torch.Tensor, *, to_host: bool) -> None:
        """Make the copies that a new one of the other direction follows: the stream orders them, without a wait."""
        if any(copy.to_host == to_host and copy.overlaps(host) for copy in self._pending[device]):
            self.complete(device)

    def _start(self, device: int, copy: _Copy) -> None:
        self._num_started[device] += 1
        self._pending[device].append(copy)

    def num_started(self, device: int) -> int:
        """Copies started so far: an event that is recorded now follows these."""
        return self._num_started[device]

    def complete(self, device: int, num_started: int | None = None) -> None:
        """The host has waited for the first ``num_started`` copies of a device; None: for all."""
        pending = self._pending[device]
        num_done = self._num_started[device] - len(pending)
        last = self._num_started[device] if num_started is None else num_started
        for _ in range(max(0, last - num_done)):
            self._finish(pending.popleft())

    def _finish(self, copy: _Copy) -> None:
        if copy.to_host:
            with torch.inference_mode():
                copy.host.copy_(copy.data)
        elif not torch.equal(_bytes(copy.host), _bytes(copy.data)):
            self._on_fault(f"pinned memory was overwritten before the GPU had read it; the copy began at {copy.line}")


def poison(tensor: torch.Tensor) -> None:
    """Fill memory that holds no data yet with what no step computes."""
    with torch.inference_mode():
        if tensor.dtype.is_floating_point:
            tensor.fill_(torch.nan)
        else:
            tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max // 3)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor and the one after its last."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
