"""select_recurrent_ops: chooses the implementation of recurrent layers' operations once, at start."""

from __future__ import annotations

import logging

import torch

from kernels.recurrent.base import RecurrentOps
from kernels.recurrent.reference import ReferenceOps

__all__ = ["select_recurrent_ops"]

logger = logging.getLogger(__name__)


def select_recurrent_ops(device: torch.device, *, batch_invariant: bool = False) -> RecurrentOps:
    """Return the fastest implementation that runs here, else ReferenceOps, which runs on any device.

    That is COps for a CPU where the C kernels can be compiled, and TritonOps for a GPU where Triton can be imported.

    Args:
        batch_invariant: whether a token's bits must not depend on the step that computes it; always so on CPUs.
    """
    match device.type:
        case "cpu":
            return _ops_of_cpu()
        case "cuda":
            return _ops_of_gpu(batch_invariant=batch_invariant)
    return ReferenceOps()


def _ops_of_cpu() -> RecurrentOps:
    from kernels.cpu.library import library

    if library() is None:
        return ReferenceOps()
    from kernels.recurrent.c_ops import COps

    return COps()


def _ops_of_gpu(*, batch_invariant: bool) -> RecurrentOps:
    try:
        from kernels.recurrent.triton.ops import TritonOps
    except ImportError as error:
        logger.warning("Recurrent layers run token by token, which is slow: Triton cannot be imported (%s)", error)
        return ReferenceOps()
    return TritonOps(batch_invariant=batch_invariant)
