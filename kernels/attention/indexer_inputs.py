"""IndexerInputs: what the implementations of topk_slots compute with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention_metadata import AttentionMetadata

__all__ = ["IndexerInputs"]


@dataclass(frozen=True, slots=True)
class IndexerInputs:
    """One layer's index queries and its paged cache of index keys, this step's included, and the step's batch."""

    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    weights: torch.Tensor  # float32 [num_tokens, num_heads]
    key_cache: torch.Tensor  # [num_blocks, block_size, head_dim]
    metadata: AttentionMetadata
    scale: float  # factor of the products of queries and keys
    top_k: int
