"""read_shape: decides which implementation computes a model, and reads the config as that one needs it."""

from __future__ import annotations

import logging
from typing import Any

from engine.errors import UnsupportedModelError
from engine.models.config.families.architectures import PROVEN
from engine.models.config.families.table import ARCHITECTURES
from engine.models.config.model_config import ModelConfig
from engine.models.config.model_shape import ModelShape
from engine.models.config.transformers_config import TransformersConfig

__all__ = ["read_shape"]

logger = logging.getLogger(__name__)


def read_shape(hf_config: Any, model_impl: str, tensor_parallel_size: int = 1) -> ModelShape:
    """Return what ``hf_config`` says, read for our own decoder or for transformers' modules.

    Args:
        model_impl: ``pagoda``, ``transformers``, or ``auto`` for our own decoder where it computes the model.
        tensor_parallel_size: the number of ranks that share the model.

    Raises:
        ModelLoadError: for a model that this implementation does not compute, or is not yet proven to compute.
    """
    architecture = (getattr(hf_config, "architectures", None) or ["none"])[0]
    if model_impl == "pagoda":
        return ModelConfig.from_hf(hf_config)
    reason: str | None = None
    if model_impl == "auto" and architecture in ARCHITECTURES:
        try:
            config = ModelConfig.from_hf(hf_config)
            if tensor_parallel_size > 1:
                config.require_divisible()
            return config
        except UnsupportedModelError as error:  # e.g. an activation that only transformers' modules compute
            if architecture not in PROVEN:
                raise
            reason = str(error)
            logger.info("Our own decoder does not compute %s with this config.json: %s", architecture, reason)
    return TransformersConfig.from_hf(hf_config, reason)
