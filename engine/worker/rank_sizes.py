"""Which numbers of tensor-parallel ranks share a model, and how much memory its weights take on each."""

from __future__ import annotations

import math

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError, UnsupportedModelError
from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.config.model_config import ModelConfig

__all__ = ["require_rank_size", "weight_bytes"]

_LARGEST = 64
_GIB = 2**30


def require_rank_size(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Check ``tensor_parallel_size`` against the model's heads and features, and its weights against the GPU.

    Args:
        config: options of the engine.
        model: the whole model's shape.
        dtype: of the weights.
        device: of a rank.

    Raises:
        ConfigError: the ranks cannot share the model, or it does not fit; it names the sizes that would do.
    """
    size, problem, weights = config.tensor_parallel_size, "", None
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else math.inf
    try:
        model.shard(size)
    except ConfigError as error:
        problem = error.problem
    if problem or memory < math.inf:
        weights = weight_bytes(config, dtype)
    if not problem and weights is not None and weights / size > memory:
        problem = f"gives each rank {_gib(weights / size)} of weights, and {device} has {_gib(memory)}"
    if not problem:
        return
    sizes = [other for other in range(1, _LARGEST + 1) if _divides(other, model) and (weights or 0) / other <= memory]
    shown = [str(other) if weights is None else f"{other} ({_gib(weights / other)} each)" for other in sizes]
    remedy = f"choose one of {', '.join(shown)}" if shown else "take GPUs with more memory, or a quantised checkpoint"
    raise ConfigError(problem, param="tensor_parallel_size", value=size, remedy=remedy)


def weight_bytes(config: EngineConfig, dtype: torch.dtype) -> int | None:
    """Return the bytes of a model's weights on all ranks together; None: quantised, it depends on the kernels."""
    with open_checkpoint(config.model) as checkpoint:
        if config.quantization is not None or any(map(checkpoint.is_packed, checkpoint.names)):
            return None
        return dtype.itemsize * sum(math.prod(checkpoint.shape_of(name)) for name in checkpoint.names)


def _divides(size: int, model: ModelConfig) -> bool:
    try:
        model.shard(size)
    except (ConfigError, UnsupportedModelError):
        return False
    return True


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
