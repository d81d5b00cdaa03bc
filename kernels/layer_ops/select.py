"""select_layer_ops: chooses the implementation of a decoder's layer operations once, at start."""

from __future__ import annotations

import logging

import torch

from kernels.layer_ops.base import LayerOps
from kernels.layer_ops.torch import TorchOps

__all__ = ["select_layer_ops"]

logger = logging.getLogger(__name__)


def select_layer_ops(device: torch.device) -> LayerOps:
    """Return TritonOps for a GPU where Triton can be imported, else TorchOps. A CPU needs no Triton."""
    if device.type != "cuda":
        return TorchOps()
    try:
        from kernels.layer_ops.triton.ops import TritonOps
    except ImportError as error:
        logger.warning("Layers run as torch's operators, which is slower: Triton cannot be imported (%s)", error)
        return TorchOps()
    return TritonOps()
