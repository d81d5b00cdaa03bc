"""What every attention backend is given and what it must return.

The layout is PagedAttention's (Kwon et al., 2023): a sequence's keys and values live in blocks that are anywhere in the
cache, and its block table lists them in order. This module knows shapes; it computes nothing.

    query         [ a a a | b | c c ]         packed: sequence a computes 3 tokens, b 1, c 2
    cu_seqlens_q  [ 0     3   4     6 ]
    seq_lens      [ 3       9   40    ]       tokens of context, this step's included: the queries are the last ones
    block_tables  [ 7 -1 -1 | 2 5 0 | ... ]   block_size tokens each, padded with -1
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch


# Compared and hashed by identity, so that a backend can keep what it derives from one step's metadata beside it.
@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """One step's batch, the same for every layer: chunks of prefills and decodes in any order.

    A padding sequence, as CUDA graphs need them, has `seq_lens` 0, or a block table of -1 only. Its output is zero.
    Rows behind the last sequence's queries are nobody's: a backend may return anything there.
    A block wholly behind every query's sliding window may be -1 too; it is never read.
    Backends keep what they derive from an object of this class, so a step's tensors must not change under it; only a
    CUDA graph's may, whose derivations are captured with it.
    """

    slot_mapping: torch.Tensor  # int64 [num_tokens]: block_id * block_size + offset of each new token; -1: do not write
    cu_seqlens_q: torch.Tensor  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor  # int32 [num_seqs]
    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks]
    max_query_len: int
    max_seq_len: int


class AttentionBackend(ABC):
    """Causal attention with grouped queries over the paged cache, after this step's keys and values were stored."""

    name: ClassVar[str]
    default_block_size: ClassVar[int]

    @abstractmethod
    def check_block_size(self, block_size: int) -> None:
        """Raise ValueError, naming the value and the remedy, when blocks of `block_size` tokens cannot be read."""

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Return softmax(scale * Q K^T) V for every packed query.

        query        [num_tokens, num_heads, head_dim]
        key_cache    [num_blocks, block_size, num_kv_heads, head_dim], value_cache alike
        returns      [num_tokens, num_heads, head_dim], the query's dtype; the softmax is taken in float32

        A query at position p of its sequence sees the keys at positions j <= p, and with `sliding_window` = W only
        those with p - j < W, as transformers does it for Mistral. Query head h reads KV head
        h // (num_heads // num_kv_heads).
        """
