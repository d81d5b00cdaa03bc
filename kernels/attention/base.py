"""What every attention backend takes and returns: AttentionInputs, StepLimits, AttentionBackend. Nothing is computed.

registry.py lists the backends and says how to add one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels.attention.registry import BACKENDS
from kernels.attention.window import Window
from kernels.attention_metadata import AttentionMetadata
from kernels.cache.fp8 import FP8

__all__ = ["AttentionBackend", "AttentionInputs", "StepLimits"]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One layer's queries and paged cache, and the step's batch.

    A query at position p of its sequence sees the keys at positions j <= p. With a sliding `window` = W it sees only
    those with p - j < W, as in transformers' Mistral, and with a chunk only those of its own chunk: see window.py.
    Query head h reads KV head h // group_size.

    Some options need a backend whose line in registry.py names them. A soft-cap C replaces each score s by
    C * tanh(s / C) (Gemma 2). A sink is one more score of each query of a head, without a value (GPT-OSS). With latents
    there is one KV head, and a value is the beginning of its key: the same memory, which is to be read once. With
    `topk_slots` a query sees only the keys in these slots, which are at positions up to its own; see indexer.py. With
    `fp8` the cache is FP8 of keys and values, divided by scales: see kernels/cache/fp8.py.

    Where a backend `expands_latents`, prefills may read keys and values that were computed from latents. The heads of
    such keys share their last elements, which are in `rope_cache`, and `key_cache` has the others. It and `value_cache`
    are parts of one tensor, so that their strides are equal.
    """

    query: torch.Tensor  # [num_tokens, num_heads, head_dim], packed: see AttentionMetadata
    key_cache: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: torch.Tensor  # the same shape, or another value_dim; of latents key_cache[..., :value_dim]
    metadata: AttentionMetadata
    scale: float  # factor of Q K^T
    window: Window | None = None  # None: all keys are seen
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # float32 [num_heads]
    topk_slots: torch.Tensor | None = None  # int32 [num_tokens, at most top_k], by position, then -1; of latents
    key_scale: float = 1.0  # of a cache in FP8: what a stored key is multiplied by
    value_scale: float = 1.0
    rope_cache: torch.Tensor | None = None  # [num_blocks, block_size, 1, rope_dim], of expanded latents

    @property
    def block_size(self) -> int:
        """Tokens in a block of the cache."""
        return self.key_cache.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Heads of the cache."""
        return self.key_cache.shape[2]

    @property
    def num_heads(self) -> int:
        """Heads of the queries."""
        return self.query.shape[1]

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.query.shape[1] // self.key_cache.shape[2]

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.query.shape[2]

    @property
    def value_dim(self) -> int:
        """Elements of a head's value, and of its output."""
        return self.value_cache.shape[3]

    @property
    def is_fp8(self) -> bool:
        """Whether the cache is in FP8."""
        return self.key_cache.dtype == FP8

    @property
    def has_latents(self) -> bool:
        """Whether a value is the beginning of its key."""
        return self.value_dim < self.head_dim and self.value_cache.data_ptr() == self.key_cache.data_ptr()


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What an engine can ask a backend to compute: one rank's attention layers, and the longest sequences.

    A step of a warm-up computes every layer, so the sizes of heads need no mention.

    Attributes:
        windows: of all layers; None: a layer sees all keys.
        max_query_len: tokens of one sequence that a step computes at most.
        max_seq_len: tokens of the longest context.
    """

    dtype: torch.dtype
    device: torch.device
    windows: frozenset[Window | None]
    max_query_len: int
    max_seq_len: int


class AttentionBackend(ABC):
    """Causal attention with grouped queries over the paged cache, after this step's keys and values were stored.

    Attributes:
        name: its key in the table of registry.py.
        default_block_size: tokens.
        uses_cpu_kernels: whether the model's layers run in the C kernels of kernels/cpu too.
        captures_chunks: whether a CUDA graph may hold a step with sequences of several tokens, and padding among them.
        expands_latents: whether it computes prefills with a `rope_cache`.
        why_chosen: why `select_backend` chose it, and why faster backends cannot run.
    """

    name: ClassVar[str]
    default_block_size: ClassVar[int]
    uses_cpu_kernels: ClassVar[bool] = False
    captures_chunks: ClassVar[bool] = False
    expands_latents: ClassVar[bool] = False
    why_chosen: str = ""

    @classmethod
    def why_unusable(cls, device: torch.device) -> str | None:
        """Return why the backend cannot run on `device`; None if it can.

        An ImportError of the module or the constructor is another reason, which `select_backend` reports.
        """
        devices = BACKENDS[cls.name].devices
        return None if device.type in devices else f"it needs a {' or '.join(devices)} device"

    @abstractmethod
    def check_block_size(self, block_size: int) -> None:
        """Raise ValueError, naming the value and the remedy, when blocks of `block_size` tokens cannot be read."""

    def warm_up_batches(self, limits: StepLimits) -> list[tuple[int, int]]:
        """Return batches of one sequence, as (query_len, seq_len), after which no step within `limits` compiles.

        A backend that compiles nothing at run time returns no batches.
        """
        return []

    @abstractmethod
    def forward(self, inputs: AttentionInputs) -> torch.Tensor:
        """Return softmax(scale * Q K^T) V for every packed query, [num_tokens, num_heads, value_dim].

        The result has the query's dtype; the softmax is computed in float32.
        """
