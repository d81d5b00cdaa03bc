"""The two functions of flash-attn that we call, in plain torch, as flash-attn 2.8's docstrings describe them.

They refuse what flash-attn refuses and fail where it would read outside the cache. Nothing here knows our metadata.
"""

from __future__ import annotations

import torch


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    assert block_table is not None, "without a block table k and v would have to be packed"
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q.shape == cu_seqlens_k.shape == (block_table.shape[0] + 1,)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) <= max_seqlen_k
    assert dropout_p == 0.0
    out = torch.full_like(q, torch.nan)
    for i in range(block_table.shape[0]):
        rows = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        seqlen_k = int(cu_seqlens_k[i + 1] - cu_seqlens_k[i])
        out[rows] = attend_to_pages(
            q[rows], k, v, block_table[i], seqlen_k, softmax_scale, causal, window_size, softcap
        )
    return out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: None = None,
    v: None = None,
    cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    assert block_table is not None
    assert k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert cache_seqlens is not None
    assert cache_seqlens.dtype == torch.int32
    assert cache_seqlens.shape == (q.shape[0],) == block_table.shape[:1]
    sequences = [
        attend_to_pages(
            q[i], k_cache, v_cache, block_table[i], int(seqlen_k), softmax_scale, causal, window_size, softcap
        )
        for i, seqlen_k in enumerate(cache_seqlens)
    ]
    return torch.stack(sequences)  # [batch_size, seqlen_q, num_heads, head_dim]


def attend_to_pages(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """Compute one sequence, [seqlen_q, num_heads, head_dim]."""
    page_size = k_cache.shape[1]
    assert block_table.dtype == torch.int32
    i = torch.arange(q.shape[0])[:, None] + seqlen_k - q.shape[0]  # aligned to the bottom right corner
    left, right = window_size
    if causal:
        right = 0
    first_key = 0 if left < 0 else max(0, seqlen_k - q.shape[0] - left)
    j = torch.arange(first_key, seqlen_k)[None, :]
    visible = (j >= i - left if left >= 0 else torch.tensor(True)) & (j <= i + right if right >= 0 else True)
    pages = block_table.long()[j[0] // page_size]
    assert (pages >= 0).all(), "illegal memory access: a page before the cache"
    k, v = (cache[pages, j[0] % page_size].double() for cache in (k_cache, v_cache))
    group_size = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.repeat_interleave(group_size, 1))
    scores = scores * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)  # a row that sees nothing: zero
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group_size, 1)).to(q.dtype)
