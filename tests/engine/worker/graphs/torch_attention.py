"""What a captured step needs, by torch's operators: attention and the cache write, without a wait for a value."""

from __future__ import annotations

from typing import ClassVar

import torch

from kernels.attention.base import AttentionBackend, AttentionInputs

__all__ = ["TorchAttention", "store_kvcache"]


class TorchAttention(AttentionBackend):
    """Attention of every token over all blocks of its table: launches depend on shapes alone."""

    name: ClassVar[str] = "cpu"
    default_block_size: ClassVar[int] = 4
    captures_chunks: ClassVar[bool] = True

    def check_block_size(self, block_size: int) -> None:
        pass

    def forward(self, inputs: AttentionInputs) -> torch.Tensor:
        metadata, num_tokens = inputs.metadata, inputs.query.shape[0]
        tokens = torch.arange(num_tokens)
        ends = metadata.cu_seqlens_q[1:].long()
        owners = torch.searchsorted(ends, tokens, right=True).clamp(max=metadata.num_seqs - 1)
        positions = metadata.seq_lens[owners] - (ends[owners] - tokens)
        tables = metadata.block_tables[owners].long()  # [num_tokens, max_blocks]
        offsets = torch.arange(inputs.block_size)
        keys_at = (tables.clamp(min=0)[:, :, None] * inputs.block_size + offsets).flatten(1)  # [num_tokens, num_keys]
        distance = positions[:, None] - torch.arange(keys_at.shape[1])
        visible = (distance >= 0) & (tables >= 0).repeat_interleave(inputs.block_size, dim=1)
        if inputs.window is not None:
            visible &= distance < inputs.window
        keys, values = (
            cache.flatten(0, 1)[keys_at].repeat_interleave(inputs.group_size, dim=2)
            for cache in (inputs.key_cache, inputs.value_cache)
        )
        scores = torch.einsum("thd,tkhd->thk", inputs.query, keys) * inputs.scale
        weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(dim=-1)
        weights = weights.masked_fill(~visible[:, None], 0.0)  # of a padding sequence they are NaN
        return torch.einsum("thk,tkhd->thd", weights, values)


def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *_scales: float,  # of FP8, which no test here has
) -> None:
    """Compute ``kernels.cache.store_kvcache``: write every slot, most of them with what it holds."""
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    writers = slot_mapping[:, None] == torch.arange(num_slots)  # [num_tokens, num_slots]
    is_written, writer = writers.any(dim=0)[:, None, None], writers.int().argmax(dim=0)
    for new, cache in ((key, key_cache), (value, value_cache)):
        slots = cache.view(num_slots, *cache.shape[2:])
        slots.copy_(torch.where(is_written, new[writer], slots))
