"""Paged attention by flash-attn (FlashAttention-2; Dao, 2023).

flash-attn aligns a causal mask with the end of the context, as our packed queries need. It reads keys through a block
table whose blocks are a multiple of 256 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from kernels.attention.base import AttentionInputs
from kernels.attention.flash.base import FlashBackend, Part, scoring_options

__all__ = ["FlashAttnBackend"]

_FIRST_CAPABILITY = (8, 0)  # Ampere: FlashAttention-2 supports nothing older
_PAGE_SIZE = 256  # tokens: flash-attn's pages are a multiple of this


class FlashAttnBackend(FlashBackend):
    """flash-attn's split-KV kernel for decodes, and its varlen kernel for the other sequences."""

    name: ClassVar[str] = "flash_attn"
    default_block_size: ClassVar[int] = _PAGE_SIZE

    def __init__(self) -> None:
        super().__init__()
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._varlen: Callable[..., torch.Tensor] = flash_attn_varlen_func
        self._with_kvcache: Callable[..., torch.Tensor] = flash_attn_with_kvcache

    @classmethod
    def why_unusable(cls, device: torch.device) -> str | None:
        if reason := super().why_unusable(device):
            return reason
        if torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
            return "it needs a GPU of compute capability 8.0 or newer"
        return None

    def check_block_size(self, block_size: int) -> None:
        if block_size < 1 or block_size % _PAGE_SIZE:
            raise ValueError(
                f"block_size={block_size} is not a multiple of {_PAGE_SIZE}, which flash-attn needs; "
                f"use {_PAGE_SIZE}, or the triton attention backend for smaller blocks"
            )

    def _attend(self, part: Part, query: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        if part.is_decodes:
            attended = self._with_kvcache(
                query[:, None],  # [num_seqs, 1, num_heads, head_dim]
                inputs.key_cache,
                inputs.value_cache,
                cache_seqlens=part.seq_lens,
                block_table=part.block_tables,
                **scoring_options(inputs),
            )
            return attended[:, 0]
        return self._varlen(
            query,
            inputs.key_cache,
            inputs.value_cache,
            cu_seqlens_q=part.cu_seqlens_q,
            cu_seqlens_k=part.cu_seqlens_k,
            max_seqlen_q=part.max_query_len,
            max_seqlen_k=part.max_seq_len,
            block_table=part.block_tables,
            **scoring_options(inputs),
        )
