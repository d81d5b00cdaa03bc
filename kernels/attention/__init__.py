"""Attention over the paged KV cache: one interface, three backends, chosen once when an engine starts."""

from kernels.attention.base import AttentionBackend, AttentionMetadata
from kernels.attention.select import select_backend

__all__ = ["AttentionBackend", "AttentionMetadata", "select_backend"]
