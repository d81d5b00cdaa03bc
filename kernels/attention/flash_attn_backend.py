"""Paged attention by flash-attn (FlashAttention-2; Dao, 2023): translates our batch into its arguments.

flash-attn aligns a causal mask with the end of the context, as our packed queries need, and reads keys through a block
table whose blocks are a multiple of 256 tokens. It is imported when the backend is chosen, never before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch

from kernels.attention.base import AttentionBackend, AttentionInputs
from kernels.attention_metadata import AttentionMetadata

_FIRST_CAPABILITY = (8, 0)  # Ampere: FlashAttention-2 supports nothing older
_PAGE_SIZE = 256  # tokens: flash-attn's pages are a multiple of this
_NO_WINDOW = (-1, -1)


@dataclass(frozen=True)
class _StepArguments:
    """Arguments of flash-attn that are derived from a step's metadata."""

    seq_lens: torch.Tensor  # int32 [num_seqs], 0 for a padding sequence
    cu_seqlens_k: torch.Tensor  # int32 [num_seqs + 1]


class FlashAttnBackend(AttentionBackend):
    """flash-attn's varlen kernel for mixed steps and its split-KV kernel for pure decodes; float16 and bfloat16."""

    name: ClassVar[str] = "flash_attn"
    default_block_size: ClassVar[int] = _PAGE_SIZE

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._varlen: Callable[..., torch.Tensor] = flash_attn_varlen_func
        self._with_kvcache: Callable[..., torch.Tensor] = flash_attn_with_kvcache
        self._steps: WeakKeyDictionary[AttentionMetadata, dict[bool, _StepArguments]] = WeakKeyDictionary()

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

    def forward(self, inputs: AttentionInputs) -> torch.Tensor:
        query, metadata = inputs.query, inputs.metadata
        step = self._step_arguments(metadata, inputs.block_size)
        # flash-attn's window is inclusive.
        window = _NO_WINDOW if inputs.sliding_window is None else (inputs.sliding_window - 1, 0)
        softcap = inputs.softcap or 0.0
        assert inputs.sinks is None
        if metadata.max_query_len == 1 and query.shape[0] == metadata.num_seqs:
            attended = self._with_kvcache(
                query[:, None],  # [num_seqs, 1, num_heads, head_dim]
                inputs.key_cache,
                inputs.value_cache,
                cache_seqlens=step.seq_lens,
                block_table=metadata.block_tables,
                softmax_scale=inputs.scale,
                causal=True,
                window_size=window,
                softcap=softcap,
            )
            return attended[:, 0]
        return self._varlen(
            query,
            inputs.key_cache,
            inputs.value_cache,
            cu_seqlens_q=metadata.cu_seqlens_q,
            cu_seqlens_k=step.cu_seqlens_k,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=inputs.scale,
            causal=True,
            window_size=window,
            softcap=softcap,
            block_table=metadata.block_tables,
        )

    def _step_arguments(self, metadata: AttentionMetadata, block_size: int) -> _StepArguments:
        # What a CUDA graph replays must be computed inside its capture; values of the warm-up before it would be stale.
        capturing = metadata.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing()
        steps = self._steps.setdefault(metadata, {})
        if capturing not in steps:
            steps[capturing] = _step_arguments(metadata, block_size)
        return steps[capturing]


def _step_arguments(metadata: AttentionMetadata, block_size: int) -> _StepArguments:
    last_block = ((metadata.seq_lens - 1).clamp(min=0) // block_size).long()[:, None]
    # flash-attn follows a block table wherever it points, so a sequence without blocks must have no keys.
    has_blocks = metadata.block_tables.gather(1, last_block)[:, 0] >= 0
    seq_lens = metadata.seq_lens * has_blocks
    cu_seqlens_k = torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    return _StepArguments(seq_lens, cu_seqlens_k)
