"""GatedNorm: an RMSNorm of groups of elements that is multiplied by an activated gate, computed in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["GatedNorm"]

GateActivation = Literal["silu", "sigmoid"]

_ACTIVATIONS: dict[GateActivation, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


class GatedNorm(nn.Module):
    """The RMSNorm of a recurrent layer's output.

    Args:
        width: elements that have weights of their own.
        group: elements that are normalised together.
        eps: added to the mean square.
        gates_first: whether the activated gate is multiplied before the norm, or after it.
        activation: of the gate.
    """

    def __init__(
        self, width: int, group: int, eps: float, *, gates_first: bool, activation: GateActivation = "silu"
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.group, self.eps, self.gates_first = group, eps, gates_first
        self.activation = _ACTIVATIONS[activation]

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Map ``x`` and ``gate``, both [num_tokens, features], to the norm, in the dtype of ``x``."""
        values, activated = x.float(), self.activation(gate.float())
        if self.gates_first:
            values = values * activated
        normed = F.rms_norm(values.view(len(x), -1, self.group), (self.group,), eps=self.eps)
        weighted = (normed.view(len(x), -1, len(self.weight)) * self.weight.float()).flatten(1)
        return (weighted if self.gates_first else weighted * activated).to(x.dtype)
