"""What the kernels must compute, written as plainly as torch allows: one loop over sequences, in float64.

Tests compare every backend with these functions. They know nothing about speed and are never used to serve.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from kernels.attention.base import AttentionMetadata


def attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Compute `AttentionBackend.forward`; shapes and meaning are documented there."""
    output = torch.zeros_like(query)
    bounds = metadata.cu_seqlens_q.tolist()
    for i, (start, end) in enumerate(pairwise(bounds)):
        seq_len = int(metadata.seq_lens[i])
        slots = _slots_of_context(metadata.block_tables[i], seq_len, key_cache.shape[1])
        if start == end or not slots:
            continue
        positions = torch.tensor(list(slots), device=query.device)  # [num_keys]
        rows = torch.tensor(list(slots.values()), device=query.device)
        query_positions = torch.arange(seq_len - (end - start), seq_len, device=query.device)
        distance = query_positions[:, None] - positions[None, :]  # [num_queries, num_keys]
        visible = distance >= 0
        if sliding_window is not None:
            visible &= distance < sliding_window
        keys, values = key_cache.flatten(0, 1)[rows], value_cache.flatten(0, 1)[rows]
        output[start:end] = _attend(query[start:end], keys, values, visible, scale).to(query.dtype)
    return output


def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Compute `kernels.store_kvcache`; shapes and meaning are documented there."""
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, slot % block_size] = key[token]
            value_cache[slot // block_size, slot % block_size] = value[token]


def _slots_of_context(block_table: torch.Tensor, seq_len: int, block_size: int) -> dict[int, int]:
    """Map each position whose block is there to its slot in the cache."""
    blocks = block_table.tolist()
    return {
        position: blocks[position // block_size] * block_size + position % block_size
        for position in range(seq_len)
        if blocks[position // block_size] >= 0
    }


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Dense attention of [num_queries, num_heads, head_dim] over [num_keys, num_kv_heads, head_dim], in float64."""
    group_size = query.shape[1] // keys.shape[1]
    keys = keys.double().repeat_interleave(group_size, dim=1)
    values = values.double().repeat_interleave(group_size, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
