"""ModelShape and AttentionShape: what the engine has to know of any model, before and after its weights are loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

__all__ = ["AttentionShape", "ModelShape"]


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The attention layers that one rank computes; all have the same heads."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_windows: frozenset[int | None]  # of all layers, in tokens; None: the layer attends to everything

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes that one token's keys and values take in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class ModelShape(ABC):
    """What a checkpoint's config says about any model.

    Attributes:
        attention_options: what the layers need of an attention backend: see ``kernels.attention.registry``.
    """

    architecture: str
    vocab_size: int
    max_position_embeddings: int
    dtype: torch.dtype
    attention_options: frozenset[str] = frozenset()

    @abstractmethod
    def check_options(self, *, max_model_len: int, tensor_parallel_size: int, quantization: str | None) -> None:
        """Raise ConfigError if the engine's options do not fit the model."""
