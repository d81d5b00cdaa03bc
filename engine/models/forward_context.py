"""ForwardContext: what the attention layers of one step share, passed to them explicitly.

The model knows nothing of blocks or sequences; whatever it needs of them is in here.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv.kv_cache import KVCache
from kernels.attention import AttentionBackend, AttentionMetadata

__all__ = ["ForwardContext"]


@dataclass(frozen=True)
class ForwardContext:
    """One step's attention: the backend, where keys and values live, and who attends to what."""

    backend: AttentionBackend
    metadata: AttentionMetadata
    kv_cache: KVCache
