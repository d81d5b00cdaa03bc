"""Attention with a soft-cap or sinks in plain torch, for layers that torch's SDPA does not compute.

Queries are computed in slices, so that the scores of a long prompt never exist at once.
"""

from __future__ import annotations

import torch

__all__ = ["softmax_attention"]

_QUERIES_AT_ONCE = 128


def softmax_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return softmax(cap(scale * Q K^T) + mask) V with torch's dimensions and dtype; scores are float32.

    Args:
        query: [..., num_queries, head_dim].
        keys: [..., num_keys, head_dim]; ``values`` likewise.
        mask: of bool, whether a query sees a key, or of numbers that are added; it broadcasts to the scores
            [..., num_queries, num_keys].
        is_causal: query i sees the keys up to i; then there is no mask.
        softcap: C of C * tanh(score / C).
        sinks: scores without a value, which broadcast to [..., num_queries, 1].
    """
    keys, values = keys.float(), values.float()
    num_queries = query.shape[-2]
    parts = []
    for start in range(0, num_queries, _QUERIES_AT_ONCE):
        end = min(start + _QUERIES_AT_ONCE, num_queries)
        scores = query[..., start:end, :].float() @ keys.transpose(-1, -2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if is_causal:
            hidden = torch.ones(end - start, keys.shape[-2], dtype=torch.bool, device=keys.device).triu(start + 1)
            scores.masked_fill_(hidden, float("-inf"))
        elif mask is not None:
            part = mask if mask.shape[-2] == 1 else mask[..., start:end, :]
            scores = scores.masked_fill(~part, float("-inf")) if part.dtype == torch.bool else scores + part
        parts.append(_weights(scores, sinks) @ values)
    return torch.cat(parts, dim=-2).to(query.dtype)


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax of [..., num_queries, num_keys], in which a sink takes a share and gives nothing."""
    if sinks is None:
        return scores.softmax(dim=-1)
    with_sink = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1)
    return with_sink.softmax(dim=-1)[..., :-1]
