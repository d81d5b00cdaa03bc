"""Routing tokens to experts: which experts a token chooses, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Groups", "Scores", "route"]


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of equally many experts: a token chooses some of the groups, and then experts in these.

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
        if self.groups is None and self.bias is None:
            return logits  # in the order of their scores, of which several may be rounded to 1
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
