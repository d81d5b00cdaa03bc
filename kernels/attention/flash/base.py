"""FlashBackend: what the backends of the flash-attn packages have in common.

A step's decodes and its prefills are two calls: in one call with a prefill, flash-attn would give each decode a whole
tile of queries and would not split its context.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from kernels.attention.base import AttentionBackend, AttentionInputs
from kernels.attention.step_cache import StepCache
from kernels.attention.window import Chunk, most_keys
from kernels.attention_metadata import AttentionMetadata

__all__ = ["FlashBackend", "Part", "scoring_options"]


@dataclass(frozen=True, slots=True)
class Part:
    """The decodes of a step, or its other sequences, as flash-attn's arguments."""

    first_token: int
    end_token: int
    cu_seqlens_q: torch.Tensor  # int32 [num_seqs + 1], from the part's first token
    seq_lens: torch.Tensor  # int32 [num_seqs], 0 for a padding sequence
    cu_seqlens_k: torch.Tensor | None  # int32 [num_seqs + 1]; None for decodes
    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks]
    max_query_len: int
    max_seq_len: int

    @property
    def is_decodes(self) -> bool:
        """Whether each sequence has exactly one query."""
        return self.cu_seqlens_k is None


class FlashBackend(AttentionBackend):
    """float16 and bfloat16; sliding windows and soft-caps."""

    def __init__(self) -> None:
        self._parts: StepCache[None, list[Part]] = StepCache()

    def forward(self, inputs: AttentionInputs) -> torch.Tensor:
        assert inputs.sinks is None
        assert not isinstance(inputs.window, Chunk)
        block_size = inputs.block_size
        parts = self._parts.get(inputs.metadata, None, lambda: _parts(inputs.metadata, inputs.query, block_size))
        if not parts:
            return torch.empty_like(inputs.query)
        outputs = [self._attend(part, inputs.query[part.first_token : part.end_token], inputs) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @abstractmethod
    def _attend(self, part: Part, query: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """Return the attention of a part's queries, [num_tokens, num_heads, head_dim]."""


def scoring_options(inputs: AttentionInputs) -> dict[str, Any]:
    """Return the options that all functions of the packages have: which keys a query sees, and their scores."""
    return {
        "softmax_scale": inputs.scale,
        "causal": True,
        "window_size": (-1, -1) if inputs.window is None else (most_keys(inputs.window) - 1, 0),  # inclusive
        "softcap": inputs.softcap or 0.0,
    }


def _parts(metadata: AttentionMetadata, query: torch.Tensor, block_size: int) -> list[Part]:
    num_decodes, num_seqs = metadata.num_decodes, metadata.num_seqs
    parts = []
    if num_decodes:
        parts.append(_part(metadata, slice(0, num_decodes), num_decodes, block_size, is_decodes=True))
    if num_decodes < num_seqs:
        parts.append(_part(metadata, slice(num_decodes, num_seqs), query.shape[0], block_size, is_decodes=False))
    return parts


def _part(metadata: AttentionMetadata, sequences: slice, end_token: int, block_size: int, *, is_decodes: bool) -> Part:
    first_token = sequences.start  # each sequence before has one query
    bounds = metadata.cu_seqlens_q[sequences.start : sequences.stop + 1]
    block_tables, seq_lens = metadata.block_tables[sequences], metadata.seq_lens[sequences]
    last_block = ((seq_lens - 1).clamp(min=0) // block_size).long()[:, None]
    # flash-attn follows a block table wherever it points, so a sequence without blocks must have no keys.
    seq_lens = seq_lens * (block_tables.gather(1, last_block)[:, 0] >= 0)
    return Part(
        first_token=first_token,
        end_token=end_token,
        cu_seqlens_q=bounds - first_token if first_token else bounds,
        seq_lens=seq_lens,
        cu_seqlens_k=None if is_decodes else pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
        block_tables=block_tables,
        max_query_len=1 if is_decodes else metadata.max_query_len,
        max_seq_len=metadata.max_seq_len,
    )
