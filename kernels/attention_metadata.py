"""AttentionMetadata: one step's batch as the kernels see it. It holds shapes and indices, and computes nothing.

The layout is PagedAttention's (Kwon et al., 2023): a sequence's keys and values live in blocks that are anywhere in the
cache, and its block table lists them in order.

    query         [ a | b b b | c c ]         packed: sequence a computes 1 token, b 3, c 2
    cu_seqlens_q  [ 0   1       4    6 ]
    seq_lens      [ 9     3       40   ]      tokens of context, this step's included: the queries are the last ones
    block_tables  [ 2 5 0 | 7 -1 -1 | ... ]   block_size tokens each, padded with -1
    num_decodes   1                           decodes come first
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

import torch

__all__ = ["AttentionMetadata", "leading_decodes"]


def leading_decodes(query_lens: Iterable[int]) -> int:
    """Return how many sequences at the start of a batch have one query: its ``num_decodes``."""
    return sum(1 for _ in takewhile(lambda query_len: query_len == 1, query_lens))


# Compared and hashed by identity, so that a backend can cache what it derives from one step's metadata.
@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """One step's batch, the same for every layer: decodes, then chunks of prefills.

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
    num_decodes: int  # the first sequences, with exactly one query each; those after them may have any number
    max_query_len: int
    max_seq_len: int
    # (query_len, seq_len) of the sequences after the decodes, as the host knows them; empty where it does not: a CUDA
    # graph is replayed with others.
    host_lens: tuple[tuple[int, int], ...] = ()

    @property
    def num_seqs(self) -> int:
        """Sequences of the batch, padding included."""
        return self.seq_lens.shape[0]
