"""What kernels/experts must compute, as plainly as torch allows. Only tests use it."""

from __future__ import annotations

import torch

__all__ = ["experts", "route"]


def route(logits: torch.Tensor, top_k: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `kernels.experts.route.route`; of equal logits the first ones are chosen."""
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    exponentials = logits.double().exp()
    weights = (exponentials / exponentials.sum(dim=1, keepdim=True)).gather(1, ids).float()
    return weights / weights.sum(dim=1, keepdim=True) if normalize else weights, ids


def experts(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    scales_inputs: bool = False,
) -> torch.Tensor:
    """Compute `kernels.experts.experts.experts` token by token, in float64."""
    output = torch.zeros_like(hidden, dtype=torch.float64)
    for token, (its_weights, its_ids) in enumerate(zip(weights.tolist(), ids.tolist(), strict=True)):
        for weight, expert in zip(its_weights, its_ids, strict=True):
            before, after = (weight, 1.0) if scales_inputs else (1.0, weight)
            gate, up = (gate_up[expert].double() @ (before * hidden[token].double())).chunk(2)
            output[token] += after * (down[expert].double() @ (gate * gate.sigmoid() * up))
    return output.to(hidden.dtype)
