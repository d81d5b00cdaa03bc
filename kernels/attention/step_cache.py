"""StepCache: what a backend derives from a step's metadata, once for all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from kernels.attention_metadata import AttentionMetadata

__all__ = ["StepCache"]

Key = TypeVar("Key")
Value = TypeVar("Value")


class StepCache(Generic[Key, Value]):
    """Values by metadata, which it does not keep alive, and by a key that the backend chooses."""

    def __init__(self) -> None:
        self._steps: WeakKeyDictionary[AttentionMetadata, dict[tuple[bool, Key], Value]] = WeakKeyDictionary()

    def get(self, metadata: AttentionMetadata, key: Key, compute: Callable[[], Value]) -> Value:
        """Return the value of this step and key, which is computed the first time."""
        # What a CUDA graph replays must be computed inside its capture; values of the warm-up before it would be stale.
        capturing = metadata.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing()
        values = self._steps.setdefault(metadata, {})
        if (capturing, key) not in values:
            values[capturing, key] = compute()
        return values[capturing, key]
