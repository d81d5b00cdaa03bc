"""ModelShape and AttentionShape: what the engine has to know of any model, before and after its weights are loaded."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from engine.models.config.files.config_json import context_length
from kernels.attention.window import Window

__all__ = ["AttentionShape", "ModelShape", "attends_causally"]

LONGROPE = "beyond them LongRoPE chooses its factors by the longest request of a batch, so one would change the others"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The attention layers that one rank computes, which may differ in the size of their heads.

    Attributes:
        num_heads: of queries, which all layers have in common.
    """

    num_heads: int
    windows: frozenset[Window | None]  # of all layers; None: the layer attends to everything


@dataclass(frozen=True, kw_only=True)
class ModelShape(ABC):
    """What a checkpoint's config says about any model.

    Attributes:
        dtype: that config.json names; None: it names none, and the weights' own is taken.
        attention_options: what the layers need of an attention backend: see ``kernels.attention.registry``.
        longrope_length: positions up to which LongRoPE uses its factors for short contexts; None without LongRoPE.
    """

    architecture: str
    vocab_size: int
    max_position_embeddings: int
    dtype: torch.dtype | None
    attention_options: frozenset[str] = frozenset()
    longrope_length: int | None = None

    def context_length(self, requested: int | None) -> int:
        """Return the context length in tokens: ``requested`` or, if that is None, all positions that can be served.

        Raises:
            ConfigError: more is requested than the model has positions.
        """
        longest, served = self.max_position_embeddings, self.longrope_length
        if requested is None and served is not None and served < longest:
            logger.warning("Contexts of up to %d of %d positions are served: %s", served, longest, LONGROPE)
            return served
        return context_length(requested, longest)

    @abstractmethod
    def check_options(self, *, max_model_len: int, tensor_parallel_size: int, quantization: str | None) -> None:
        """Raise ConfigError if the engine's options do not fit the model."""


def attends_causally(config: Any) -> bool:
    """Return whether a token of text sees only earlier ones. With ``vision``, tokens of one image see each other."""
    return getattr(config, "use_bidirectional_attention", None) in (None, False, "vision")
