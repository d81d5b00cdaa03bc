"""select_sampling_ops: chooses how tokens are chosen on a device."""

from __future__ import annotations

import logging
from functools import cache

from kernels.sampling.base import SamplingOps

__all__ = ["select_sampling_ops"]

logger = logging.getLogger(__name__)


@cache
def select_sampling_ops(device_type: str) -> SamplingOps | None:
    """Return TritonSampling for a GPU where Triton can be imported; None: C samples on a CPU, and torch elsewhere."""
    if device_type != "cuda":
        return None
    try:
        from kernels.sampling.triton.ops import TritonSampling
    except ImportError as error:
        logger.warning("Sampling runs as torch's operators, which is slower: Triton cannot be imported (%s)", error)
        return None
    return TritonSampling()
