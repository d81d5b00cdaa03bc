"""Attention over the paged KV cache: one interface, three backends, chosen once when an engine starts.

This room knows queries, caches and block tables; it does not know layers, models or sequences' tokens. To add a
backend, implement `AttentionBackend` in a module of its own and name it in select.py.
"""

from kernels.attention.base import AttentionBackend, AttentionInputs
from kernels.attention.select import select_backend
from kernels.attention_metadata import AttentionMetadata

__all__ = ["AttentionBackend", "AttentionInputs", "AttentionMetadata", "select_backend"]
