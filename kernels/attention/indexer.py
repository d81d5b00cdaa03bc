"""topk_slots: which tokens each query of DeepSeek Sparse Attention (DeepSeek-V3.2, 2025) attends to.

An indexer scores the tokens up to a query's own with a few small heads: the score of a key is

    sum over heads of  weight * relu(scale * query . key)

and the query attends to the `top_k` tokens with the highest scores, to all while there are no more. Of equal scores
those of earlier tokens count as higher.

Each query is computed by itself. So what it gets depends neither on the rest of the batch, nor on how its prompt was
cut. On a GPU triton/indexer.py computes the same, and kernels/cpu/csrc/layer/indexer.h in models that run in C. The
Hadamard rotation and FP8 of published kernels are for their speed, and change scores only by rounding.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from kernels.attention.indexer_inputs import IndexerInputs

__all__ = ["topk_slots", "topk_slots_torch"]


def topk_slots(inputs: IndexerInputs) -> torch.Tensor:
    """Return the slots of the cache that each query attends to, int32 [num_tokens, min(top_k, max_seq_len)].

    They are in the order of the tokens' positions. Rows of queries that attend to fewer end with -1, and rows of
    padding are -1.
    """
    if inputs.query.device.type == "cpu":
        return topk_slots_torch(inputs)
    from kernels.attention.triton.indexer import topk_slots_triton

    return topk_slots_triton(inputs)


def topk_slots_torch(inputs: IndexerInputs) -> torch.Tensor:
    """Compute `topk_slots` on a CPU, as plainly as torch allows."""
    metadata, top_k, device = inputs.metadata, inputs.top_k, inputs.query.device
    shape = (inputs.query.shape[0], min(top_k, metadata.max_seq_len))
    chosen = torch.full(shape, -1, dtype=torch.int32, device=device)
    seq_lens = metadata.seq_lens.tolist()
    for index, (start, end) in enumerate(pairwise(metadata.cu_seqlens_q.tolist())):
        slots = _slots_of_context(metadata.block_tables[index], seq_lens[index], inputs.key_cache.shape[1])
        if start == end or slots is None:
            continue
        keys = inputs.key_cache.flatten(0, 1)[slots].float() if len(slots) > top_k else None
        for row in range(start, end):
            num_visible = len(slots) - (end - 1 - row)
            own = slots[:num_visible]
            if keys is not None and num_visible > top_k:
                own = own[_highest(_scores(inputs, row, keys[:num_visible]), top_k)]
            chosen[row, : len(own)] = own
    return chosen


def _slots_of_context(block_table: torch.Tensor, seq_len: int, block_size: int) -> torch.Tensor | None:
    """Return the slots of a sequence's tokens, int64 [seq_len]; None for a padding sequence."""
    positions = torch.arange(seq_len, device=block_table.device)
    blocks = block_table[positions // block_size]
    if seq_len == 0 or int(blocks[-1]) < 0:
        return None
    return blocks.long() * block_size + positions % block_size


def _scores(inputs: IndexerInputs, row: int, keys: torch.Tensor) -> torch.Tensor:
    """Return one query's scores of float32 keys [num_keys, head_dim], float32 [num_keys]."""
    products = inputs.query[row].float() @ keys.T * inputs.scale  # [num_heads, num_keys]
    return inputs.weights[row] @ products.relu()


def _highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ascending indices of the `count` highest scores; of equal ones the first."""
    return scores.sort(descending=True, stable=True).indices[:count].sort().values
