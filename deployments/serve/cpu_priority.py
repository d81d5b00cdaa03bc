"""The priority of an engine that computes on the cores that the ingress and HAProxy use too."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from engine.config import EngineConfig

__all__ = ["NICENESS", "in_yielding_thread"]

Started = TypeVar("Started")

# More than the ingress's. The kernel's maximum is 19, and Ray starts its workers at 15 if RAY_worker_niceness does not
# say otherwise, as the launcher does: the scheduler then gives the engine a third of a core that the ingress wants too.
NICENESS = 19


def in_yielding_thread(config: EngineConfig, start: Callable[[], Started]) -> Started:
    """Return what ``start`` returns, called in a thread of its own.

    If the engine computes on CPUs, other processes run before that thread and all threads and processes that it starts.
    The caller's thread keeps its priority: it takes the requests, which count as arrived only when it does.

    In a burst a request that waits in the ingress is in no batch: the engine computes small, expensive ones meanwhile,
    and the first tokens come later. On a GPU, the engine's few threads must not wait for anything.
    """
    computes_on_cpus = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
    with ThreadPoolExecutor(1, initializer=os.nice, initargs=(NICENESS if computes_on_cpus else 0,)) as thread:
        return thread.submit(start).result()
