"""The priority of an engine that computes on the cores that the ingress and HAProxy use too."""

from __future__ import annotations

import os

import torch

from engine.config import EngineConfig

__all__ = ["NICENESS", "yield_cores"]

NICENESS = 4  # more than the ingress's; the scheduler gives it half the time of a process that also wants the core


def yield_cores(config: EngineConfig) -> None:
    """Let other processes run first if this engine computes on CPUs; for the calling thread and those that it starts.

    In a burst a request that waits in the ingress is in no batch: the engine computes small, expensive ones meanwhile,
    and the first tokens come later. On a GPU, the engine's few threads must not wait for anything.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        os.nice(NICENESS)
