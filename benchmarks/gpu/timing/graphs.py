"""CUDA graphs of a few kernels: time without the host's launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.worker.graphs.device import CudaGraphDevice

__all__ = ["captured"]


def captured(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a function that replays what ``run`` launches; on a CPU, ``run`` itself.

    Tensors that ``run`` makes stay as they are between replays, and their memory belongs to the graph.
    """
    if device.type != "cuda":
        return run
    return CudaGraphDevice(device).capture(run)  # as the engine captures its decodes
