"""torch.cuda.CUDAGraph and its context without a driver: a capture records what is launched, a replay does it again.

A replay computes with the tensors that the capture saw, whatever they hold by then, and runs nothing of the product.
Before it, all that the capture made is poisoned, because graphs share their scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.gpu_rehearsal.host_memory import poison
from tests.gpu_rehearsal.machine import Machine

__all__ = ["GRAPH_BYTES", "stubs"]

GRAPH_BYTES = 2**20  # of the GPU's memory, that each graph takes


def stubs(machine: Machine) -> dict[str, Any]:
    """Return what takes the place of torch.cuda's functions."""

    class CUDAGraph:
        """torch.cuda.CUDAGraph."""

        def __init__(self) -> None:
            self._launches: list[Callable[[], object]] = []
            self._results: list[torch.Tensor] = []

        def replay(self) -> None:
            assert self._launches, "the graph is empty"
            machine.launch(machine.current_device, len(self._launches))
            machine.num_replays += 1
            with _disable_current_modes(), torch.inference_mode():
                for tensor in self._results:
                    poison(tensor)
                for launch in self._launches:
                    launch()

        def __del__(self) -> None:
            if self._launches:
                machine.graph_bytes -= GRAPH_BYTES

    @contextmanager
    def graph(cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Any:
        with machine.capture() as capture:
            yield
        cuda_graph._launches, cuda_graph._results = capture.launches, capture.results
        machine.graph_bytes += GRAPH_BYTES

    return {
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: machine.captured is not None,
    }
