"""Mixture of experts: routing tokens to experts, and the experts' feed-forward of only their own tokens.

On a CPU torch computes expert by expert, and kernels/cpu/experts.py in C; on a GPU triton/experts.py all at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from kernels.layer_ops.base import Activation

__all__ = ["Groups", "Scores", "experts", "route", "routed_experts"]


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of equally many experts, of which a token chooses some before it chooses experts in them.

    Attributes:
        count: of groups.
        chosen: how many of them a token chooses.
        sums_two: a group is chosen by the sum of its experts' two best scores; else by the best one.
    """

    count: int
    chosen: int
    sums_two: bool

    def allowed(self, scores: torch.Tensor) -> torch.Tensor:
        """Return which experts are in the groups that are chosen by ``scores``, bool [num_tokens, num_experts]."""
        grouped = scores.view(len(scores), self.count, -1)
        of_group = grouped.topk(2, dim=-1).values.sum(dim=-1) if self.sums_two else grouped.amax(dim=-1)
        ids = of_group.sort(dim=-1, descending=True, stable=True).indices[:, : self.chosen]
        allowed = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, ids, True)
        return allowed.unsqueeze(2).expand_as(grouped).reshape(scores.shape)


@dataclass(frozen=True, eq=False)
class Scores:
    """What becomes of a router's logits, in float32; without it, scores are their softmax and weights are not scaled.

    Attributes:
        bias: float32 [num_experts], added to the scores for the choice, and not to the weights.
        epsilon: added to the sum of the chosen scores, by which they are divided.
        scale: factor of the weights.
        is_sigmoid: each score is the sigmoid of a logit; else scores are the softmax of all logits.
        groups: None: all experts are one group.
    """

    bias: torch.Tensor | None = None
    epsilon: float = 0.0
    scale: float = 1.0
    is_sigmoid: bool = True
    groups: Groups | None = None

    def choice(self, logits: torch.Tensor) -> torch.Tensor:
        """Return by what experts are chosen, [num_tokens, num_experts]."""
        if self.groups is None and not self.is_sigmoid and self.bias is None:
            return logits  # in the order of their softmax
        scores = self._scores(logits)
        if self.bias is not None:
            scores = scores + self.bias
        return scores if self.groups is None else scores.where(self.groups.allowed(scores), float("-inf"))

    def weights(self, logits: torch.Tensor, ids: torch.Tensor, *, normalize: bool) -> torch.Tensor:
        """Return the weights of the chosen experts, [num_tokens, top_k]."""
        chosen = self._scores(logits).gather(1, ids)
        if normalize:
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + self.epsilon)
        return chosen * self.scale

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.float().sigmoid() if self.is_sigmoid else logits.softmax(dim=-1, dtype=torch.float32)


def routed_experts(
    hidden: torch.Tensor,
    logits: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    *,
    normalize: bool,
    scores: Scores | None = None,
    gated: bool = True,
    activation: Activation = "silu",
    expert_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what ``experts`` computes with the weights and experts that ``route`` chooses.

    Args:
        expert_scale: float32 [num_experts], factors of the chosen experts' weights; None: 1.
    """
    options: dict[str, Any] = {"gated": gated, "activation": activation}
    if hidden.device.type == "cpu":
        weights, ids = route(logits, top_k, normalize=normalize, scores=scores)
        return experts(
            hidden, up, down, weights if expert_scale is None else weights * expert_scale[ids], ids, **options
        )
    from kernels.experts.triton.experts import experts_triton

    options |= {"normalize": normalize, "scores": scores, "expert_scale": expert_scale}
    return experts_triton(hidden, logits, up, down, top_k, **options)


def route(
    logits: torch.Tensor, top_k: int, *, normalize: bool, scores: Scores | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``top_k`` most probable experts of each token, the most probable first; of equal logits the first.

    Args:
        logits: [num_tokens, num_experts], of the router.
        top_k: experts of a token.
        normalize: divide the chosen experts' probabilities by their sum.
        scores: what takes the place of the probabilities.

    Returns:
        The probabilities, float32, and the experts' indices, int64; both [num_tokens, top_k].
    """
    choice = logits if scores is None else scores.choice(logits)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]  # topk may choose any of equal ones
    if scores is not None:
        return scores.weights(logits, ids, normalize=normalize), ids
    weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, ids)
    return weights / weights.sum(dim=-1, keepdim=True) if normalize else weights, ids


def experts(
    hidden: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    gated: bool = True,
    activation: Activation = "silu",
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
            outputs[pairs] = compute(hidden[pairs // top_k], up[expert], down[expert]).float()
            start += count
    weighted = outputs.view(*ids.shape, hidden.shape[1]) * weights.unsqueeze(2)
    return weighted.sum(dim=1).to(hidden.dtype)


def _gated(activation: Activation, rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(rows, gate_up).chunk(2, dim=-1)
    return F.linear((F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up, down)


def _squared_relu(rows: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.relu(F.linear(rows, up)).square(), down)
