"""AttentionMetadata: one step's batch as the kernels see it. It holds shapes and indices, and computes nothing.

The layout is PagedAttention's (Kwon et al., 2023): a sequence's keys and values live in blocks that are anywhere in the
cache, and its block table lists them in order.

    query         [ a a a | b | c c ]         packed: sequence a computes 3 tokens, b 1, c 2
    cu_seqlens_q  [ 0     3   4     6 ]
    seq_lens      [ 3       9   40    ]       tokens of context, this step's included: the queries are the last ones
    block_tables  [ 7 -1 -1 | 2 5 0 | ... ]   block_size tokens each, padded with -1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["AttentionMetadata"]


# Compared and hashed by identity, so that a backend can cache what it derives from one step's metadata.
@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """One step's batch, the same for every layer: chunks of prefills and decodes in any order.

    A padding sequence, as CUDA graphs need them, has `seq_lens` 0, or a block table of -1 only. Its output is zero.
    Query rows after the last sequence belong to no sequence: a backend may return anything there.
    A block before every query's sliding window may be -1 too; it is never read.
    Backends cache what they derive from an object of this class, so its tensors must not change during a step. Only
    those of a CUDA graph may change: the graph captures the derivations with them.
    """

    slot_mapping: torch.Tensor  # int64 [num_tokens]: block_id * block_size + offset of each new token; -1: do not write
    cu_seqlens_q: torch.Tensor  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor  # int32 [num_seqs]
    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks]
    max_query_len: int
    max_seq_len: int

    @property
    def num_seqs(self) -> int:
        """Sequences of the batch, padding included."""
        return self.seq_lens.shape[0]
