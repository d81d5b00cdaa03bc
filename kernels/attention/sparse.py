"""sparse_attention: attention of each query to chosen slots of a cache of latents, on a CPU.

A query is computed by itself, over its own tokens in the order of their positions. So its bits depend neither on the
rest of the batch, nor on how its prompt was cut.
"""

from __future__ import annotations

import torch

from kernels.attention.base import AttentionInputs
from kernels.attention.softmax import softmax_attention

__all__ = ["sparse_attention"]


def sparse_attention(inputs: AttentionInputs) -> torch.Tensor:
    """Compute `AttentionBackend.forward` of inputs with `topk_slots`; rows that attend to nothing are zero."""
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
