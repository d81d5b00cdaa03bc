"""Mixture of experts: routing tokens to experts, and the experts' feed-forward of only their own tokens.

On a CPU torch computes expert by expert, and kernels/cpu/experts.py in C; on a GPU triton/experts.py all at once.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

__all__ = ["experts", "route", "routed_experts"]


def routed_experts(
    hidden: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    *,
    normalize: bool,
) -> torch.Tensor:
    """Return what ``experts`` computes with the weights and experts that ``route`` chooses."""
    if hidden.device.type == "cpu":
        return experts(hidden, gate_up, down, *route(logits, top_k, normalize=normalize))
    from kernels.experts.triton.experts import experts_triton

    return experts_triton(hidden, logits, gate_up, down, top_k, normalize=normalize)


def route(logits: torch.Tensor, top_k: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``top_k`` most probable experts of each token, the most probable first; of equal logits the first.

    Args:
        logits: [num_tokens, num_experts], of the router.
        top_k: experts of a token.
        normalize: divide the chosen experts' probabilities by their sum.

    Returns:
        The probabilities, float32, and the experts' indices, int64; both [num_tokens, top_k].
    """
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]  # topk may choose any of equal ones
    weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, ids)
    return weights / weights.sum(dim=-1, keepdim=True) if normalize else weights, ids


def experts(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return each token's weighted sum of its experts' SwiGLU, [num_tokens, hidden_size] in the dtype of ``hidden``.

    Computed expert by expert, which waits for a GPU.

    Args:
        hidden: [num_tokens, hidden_size].
        gate_up: [num_experts, 2 * intermediate_size, hidden_size], the rows of the gate before those of up.
        down: [num_experts, hidden_size, intermediate_size].
        weights: float32 [num_tokens, top_k].
        ids: int64 [num_tokens, top_k], which experts.
    """
    top_k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)  # pairs of token and choice, by expert
    counts = ids.flatten().bincount(minlength=len(gate_up)).tolist()
    outputs = torch.empty(len(order), hidden.shape[1], dtype=torch.float32, device=hidden.device)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            pairs = order[start : start + count]
            outputs[pairs] = _swiglu(hidden[pairs // top_k], gate_up[expert], down[expert]).float()
            start += count
    weighted = outputs.view(*ids.shape, hidden.shape[1]) * weights.unsqueeze(2)
    return weighted.sum(dim=1).to(hidden.dtype)


def _swiglu(rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(rows, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)
