"""select_recurrent_ops: chooses the implementation of recurrent layers' operations once, at start."""

from __future__ import annotations

import torch

from kernels.recurrent.base import RecurrentOps
from kernels.recurrent.reference import ReferenceOps

__all__ = ["select_recurrent_ops"]


def select_recurrent_ops(device: torch.device) -> RecurrentOps:
    """Return COps for a CPU where the C kernels can be compiled, else ReferenceOps, which runs on any device."""
    if device.type == "cpu":
        from kernels.cpu.library import library

        if library() is not None:
            from kernels.recurrent.c_ops import COps

            return COps()
    return ReferenceOps()
