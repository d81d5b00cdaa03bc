"""ForwardContext: what the layers of one step share beside their input."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv.kv_cache import KVCache
from kernels.attention.base import AttentionBackend
from kernels.attention_metadata import AttentionMetadata
from kernels.recurrent.metadata import RecurrentMetadata

__all__ = ["ForwardContext"]


@dataclass(frozen=True)
class ForwardContext:
    """What the layers of one step share, passed to them explicitly: the model itself knows no sequences.

    Attributes:
        kv_cache: whose ``layers`` are the caches that the model declares, in that order.
        recurrent: the step's batch for layers with states; None if the model has none.
    """

    backend: AttentionBackend
    metadata: AttentionMetadata
    kv_cache: KVCache
    recurrent: RecurrentMetadata | None = None
