"""GraphDevice: what captures and replays work. CudaGraphDevice does it with CUDA graphs; tests have one for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from engine.models.garbage import without_garbage_collection

__all__ = ["CudaGraphDevice", "GraphDevice"]


class GraphDevice(Protocol):
    """Captures what a function launches, as a graph that can be replayed.

    A replay repeats the launches with the same pointers and numbers: it reads and writes the memory that the capture
    read and wrote, with its present contents, and runs no Python. Graphs of one device share their scratch memory, so
    only one may run at a time, and those for large batches are captured first.
    """

    def capture(self, run: Callable[[], object]) -> Callable[[], None]:
        """Call ``run`` once, so that all it launches is ready, then capture it; return a function that queues a replay.

        Tensors that ``run`` makes must not be used outside it.
        """

    def used_memory(self) -> int:
        """Return the bytes of the device that are in use, without those that torch merely keeps for later."""


class CudaGraphDevice:
    """CUDA graphs on one GPU, with one memory pool for all of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # a capture needs its own stream
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], object]) -> Callable[[], None]:
        # Once without a capture, on the same stream: kernels are compiled, and libraries allocate their workspaces.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use CUDA meanwhile, as those of another engine in this process do.
        # A collection might free the graphs of another engine, which would become a part of this one.
        with (
            without_garbage_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            run()
        replay: Callable[[], None] = graph.replay
        return replay

    def used_memory(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)
