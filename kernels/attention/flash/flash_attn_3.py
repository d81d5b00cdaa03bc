"""Paged attention by FlashAttention-3 (Shah et al., 2024), for GPUs of the Hopper generation.

Its one function takes packed queries, a block table with blocks of any size, and each sequence's length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from kernels.attention.base import AttentionInputs
from kernels.attention.flash.base import FlashBackend, Part, scoring_options

__all__ = ["FlashAttn3Backend"]

_HOPPER = 9  # the major compute capability


class FlashAttn3Backend(FlashBackend):
    """The module flash_attn_interface of the package flash-attn-3."""

    name: ClassVar[str] = "flash_attn_3"
    default_block_size: ClassVar[int] = 16

    def __init__(self) -> None:
        super().__init__()
        from flash_attn_interface import flash_attn_with_kvcache

        self._with_kvcache: Callable[..., torch.Tensor] = flash_attn_with_kvcache

    @classmethod
    def why_unusable(cls, device: torch.device) -> str | None:
        if reason := super().why_unusable(device):
            return reason
        if torch.cuda.get_device_capability(device)[0] != _HOPPER:
            return "it needs a GPU of the Hopper generation, compute capability 9.x"
        return None

    def check_block_size(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size} holds no token; flash_attn_3 needs 1 or more")

    def _attend(self, part: Part, query: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        return self._with_kvcache(
            query,
            inputs.key_cache,
            inputs.value_cache,
            cache_seqlens=part.seq_lens,
            page_table=part.block_tables,
            cu_seqlens_q=part.cu_seqlens_q,
            max_seqlen_q=part.max_query_len,
            **scoring_options(inputs),
        )
