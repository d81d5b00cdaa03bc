"""Mixture of experts: the experts' feed-forward of only their own tokens, to which route.py routes them.

On a CPU torch computes expert by expert, and kernels/cpu/experts.py in C; on a GPU triton/experts.py all at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from kernels.experts.coded_stack import CodedStack
from kernels.experts.route import Scores, route
from kernels.layer_ops.base import Activation

__all__ = ["experts", "routed_experts"]


def routed_experts(
    hidden: torch.Tensor,
    logits: torch.Tensor,
    up: torch.Tensor | CodedStack,
    down: torch.Tensor | CodedStack,
    top_k: int,
    *,
    normalize: bool,
    scores: Scores | None = None,
    gated: bool = True,
    activation: Activation = "silu",
    expert_scale: torch.Tensor | None = None,
    scales_inputs: bool = False,
) -> torch.Tensor:
    """Return what ``experts`` computes with the weights and experts that ``route`` chooses.

    Args:
        up: as there; or codes, on a GPU.
        down: likewise.
        expert_scale: float32 [num_experts], factors of the chosen experts' weights; None: 1.
    """
    options: dict[str, Any] = {"gated": gated, "activation": activation, "scales_inputs": scales_inputs}
    if hidden.device.type == "cpu":
        assert isinstance(up, torch.Tensor)
        assert isinstance(down, torch.Tensor)
        weights, ids = route(logits, top_k, normalize=normalize, scores=scores)
        return experts(
            hidden, up, down, weights if expert_scale is None else weights * expert_scale[ids], ids, **options
        )
    from kernels.experts.triton.experts import experts_triton

    options |= {"normalize": normalize, "scores": scores, "expert_scale": expert_scale}
    return experts_triton(hidden, logits, up, down, top_k, **options)


def experts(
    hidden: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    gated: bool = True,
    activation: Activation = "silu",
    scales_inputs: bool = False,
) -> torch.Tensor:
    """Return each token's weighted sum of its experts, [num_tokens, hidden_size] in the dtype of ``hidden``.

    Computed expert by expert, which waits for a GPU.

    Args:
        hidden: [num_tokens, hidden_size].
        up: [num_experts, 2 * intermediate_size, hidden_size], the rows of the gate before the others; half of that
            if experts have no gate.
        down: [num_experts, hidden_size, intermediate_size].
        weights: float32 [num_tokens, top_k].
        ids: int64 [num_tokens, top_k], which experts.
        gated: whether an expert multiplies by a gate; else it squares what a ReLU leaves.
        activation: of the gate.
        scales_inputs: the weights multiply what experts read, and not what they return (Llama 4, 2025).
    """
    compute = partial(_gated, activation) if gated else _squared_relu
    top_k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)  # pairs of token and choice, by expert
    counts = ids.flatten().bincount(minlength=len(up)).tolist()
    outputs = torch.empty(len(order), hidden.shape[1], dtype=torch.float32, device=hidden.device)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            pairs = order[start : start + count]
            rows = hidden[pairs // top_k]
            if scales_inputs:
                rows = rows * weights.flatten()[pairs, None].to(rows.dtype)
            outputs[pairs] = compute(rows, up[expert], down[expert]).float()
            start += count
    outputs = outputs.view(*ids.shape, hidden.shape[1])
    weighted = outputs if scales_inputs else outputs * weights.unsqueeze(2)
    return weighted.sum(dim=1).to(hidden.dtype)


def _gated(activation: Activation, rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(rows, gate_up).chunk(2, dim=-1)
    return F.linear((F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up, down)


def _squared_relu(rows: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.relu(F.linear(rows, up)).square(), down)
