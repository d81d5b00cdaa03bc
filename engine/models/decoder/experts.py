"""SparseMoeBlock: a mixture of experts as a layer's feed-forward, computed by torch's operators or in Triton.

Tensor-parallel ranks hold a part of the features of every expert, so all route alike, and one sum joins their outputs.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.models.config.experts_shape import ExpertsShape
from engine.models.tensor_parallel import TensorParallel
from kernels.experts.experts import routed_experts

__all__ = ["Experts", "SparseMoeBlock"]


class Experts(nn.Module):
    """The stacked weights of a layer's experts, which the loader sets one expert at a time."""

    def __init__(self, shape: ExpertsShape, hidden_size: int) -> None:
        super().__init__()
        count, inner = shape.num_experts, shape.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden_size), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(count, hidden_size, inner), requires_grad=False)

    def set_weight(self, expert: int, name: str, weight: torch.Tensor) -> None:
        """Copy one expert's matrix ``name``, whose dtype and device all the layer's matrices take."""
        stack: nn.Parameter = getattr(self, name)
        if stack.is_meta:
            stack = nn.Parameter(torch.empty(stack.shape, dtype=weight.dtype, device=weight.device), False)
            setattr(self, name, stack)
        stack[expert] = weight


class SparseMoeBlock(nn.Module):
    """A router, its experts and, if there is one, the shared expert that computes every token.

    Args:
        shape: of a rank's share.
        hidden_size: of the residual stream.
        parallel: the rank and its group.
        shared_expert: a dense feed-forward, of the rank's share, that does not sum over the ranks.
    """

    def __init__(
        self, shape: ExpertsShape, hidden_size: int, parallel: TensorParallel, shared_expert: nn.Module | None
    ) -> None:
        super().__init__()
        self.experts_per_token, self.normalizes_weights = shape.experts_per_token, shape.normalizes_weights
        self.parallel = parallel
        self.gate = nn.Linear(hidden_size, shape.num_experts, bias=False)
        self.experts = Experts(shape, hidden_size)
        self.shared_expert = shared_expert
        self.shared_expert_gate = None if shared_expert is None else nn.Linear(hidden_size, 1, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        output = routed_experts(
            hidden,
            self.gate(hidden),
            self.experts.gate_up_proj,
            self.experts.down_proj,
            self.experts_per_token,
            normalize=self.normalizes_weights,
        )
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            output = output + torch.sigmoid(self.shared_expert_gate(hidden)) * self.shared_expert(hidden)
        return self.parallel.all_reduce(output)
