"""What every attention backend must compute, as plainly as torch allows: one loop over sequences, in float64.

Tests compare the backends with it. It is slow and never used to serve.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from kernels.attention.base import AttentionInputs
from kernels.attention.window import first_key


def attention(inputs: AttentionInputs) -> torch.Tensor:
    """Compute `AttentionBackend.forward`."""
    output = inputs.query.new_zeros(*inputs.query.shape[:2], inputs.value_cache.shape[3])
    metadata = inputs.metadata
    for i, (start, end) in enumerate(pairwise(metadata.cu_seqlens_q.tolist())):
        seq_len = int(metadata.seq_lens[i])
        if start == end or not seq_len:
            continue
        positions, rows = _context(metadata.block_tables[i], seq_len, inputs.block_size)
        if not len(positions):
            continue
        query_positions = torch.arange(seq_len - (end - start), seq_len, device=output.device)
        visible = positions[None, :] <= query_positions[:, None]  # [num_queries, num_keys]
        first_keys = [first_key(inputs.window, position) for position in query_positions.tolist()]
        visible &= positions[None, :] >= torch.tensor(first_keys, device=output.device)[:, None]
        if inputs.topk_slots is not None:
            visible &= (rows[None, :, None] == inputs.topk_slots[start:end, None, :]).any(dim=-1)
        keys = inputs.key_cache.flatten(0, 1)[rows].double() * inputs.key_scale
        if inputs.rope_cache is not None:
            shared = inputs.rope_cache.flatten(0, 1)[rows].double()
            keys = torch.cat((keys, shared.expand(-1, keys.shape[1], -1)), dim=-1)
        values = inputs.value_cache.flatten(0, 1)[rows].double() * inputs.value_scale
        output[start:end] = _attend(inputs, inputs.query[start:end], keys, values, visible).to(output.dtype)
    return output


def _context(block_table: torch.Tensor, seq_len: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions that have a block, and their slots in the cache, both [num_keys]."""
    positions = torch.arange(seq_len, device=block_table.device)
    blocks = block_table[positions // block_size].long()
    slots = blocks * block_size + positions % block_size
    return positions[blocks >= 0], slots[blocks >= 0]


def _attend(
    inputs: AttentionInputs, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Dense attention of [num_queries, num_heads, head_dim] over float64 [num_keys, num_kv_heads, head_dim]."""
    group_size = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group_size, dim=1), values.repeat_interleave(group_size, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * inputs.scale
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if inputs.sinks is not None:
        sinks = inputs.sinks.double()[:, None, None].expand(-1, query.shape[0], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, values)
