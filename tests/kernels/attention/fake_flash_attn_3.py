"""The function of FlashAttention-3 that we call, in plain torch, as its docstring describes it."""

from __future__ import annotations

import torch

from tests.kernels.attention.fake_flash_attn import attend_to_pages


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attend to pages of any size; ``q`` is packed, [total_q, num_heads, head_dim]."""
    assert cu_seqlens_q.dtype == cache_seqlens.dtype == page_table.dtype == torch.int32
    assert cu_seqlens_q.shape == (page_table.shape[0] + 1,)
    assert cache_seqlens.shape == (page_table.shape[0],)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    out = torch.full_like(q, torch.nan)
    for i, seqlen_k in enumerate(cache_seqlens.tolist()):
        rows = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        out[rows] = attend_to_pages(
            q[rows], k_cache, v_cache, page_table[i], seqlen_k, softmax_scale, causal, window_size, softcap
        )
    return out
