"""CUDA graphs of a few kernels: time without the host's launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["captured"]


def captured(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a function that replays what ``run`` launches; on a CPU, ``run`` itself.

    Tensors that ``run`` makes stay as they are between replays, and their memory belongs to the graph.
    """
    if device.type != "cuda":
        return run
    # A warm-up on another stream, as torch asks for: kernels are compiled there.
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
