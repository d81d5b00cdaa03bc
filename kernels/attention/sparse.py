"""Attention of each query to chosen slots of a cache of latents, on a CPU: in C as decodes, or with torch.

A query is computed by itself, over its own tokens in the order of their positions. So its bits depend neither on the
rest of the batch, nor on how its prompt was cut.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.attention.base import AttentionInputs
from kernels.attention.softmax import softmax_attention
from kernels.attention_metadata import AttentionMetadata

__all__ = ["as_decodes", "sparse_attention"]


def as_decodes(inputs: AttentionInputs) -> AttentionInputs:
    """Return the same attention without `topk_slots`: each query is a sequence, and its slots are blocks of one token.

    A query that attends to nothing is a padding sequence.
    """
    slots = inputs.topk_slots
    assert slots is not None
    count = slots.shape[0]
    metadata = AttentionMetadata(
        slot_mapping=inputs.metadata.slot_mapping,
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32, device=slots.device),
        seq_lens=(slots >= 0).sum(dim=1, dtype=torch.int32),
        block_tables=slots.contiguous(),
        num_decodes=count,
        max_query_len=1,
        max_seq_len=slots.shape[1],
    )
    keys = inputs.key_cache.flatten(0, 1).unsqueeze(1)
    values = keys[..., : inputs.value_dim]
    return replace(inputs, key_cache=keys, value_cache=values, metadata=metadata, topk_slots=None)


def sparse_attention(inputs: AttentionInputs) -> torch.Tensor:
    """Compute `AttentionBackend.forward` of inputs with `topk_slots`, as plainly as torch allows.

    Rows that attend to nothing are zero.
    """
    assert inputs.topk_slots is not None
    assert inputs.num_kv_heads == 1
    latents = inputs.key_cache.flatten(0, 2)  # [num_slots, head_dim]
    output = inputs.query.new_zeros(*inputs.query.shape[:2], inputs.value_dim)
    for row, count in enumerate((inputs.topk_slots >= 0).sum(dim=1).tolist()):
        if count:
            keys = latents.index_select(0, inputs.topk_slots[row, :count])
            output[row] = softmax_attention(
                inputs.query[row],
                keys,
                keys[:, : inputs.value_dim],
                mask=None,
                is_causal=False,
                scale=inputs.scale,
                softcap=None,
                sinks=None,
            )
    return output
