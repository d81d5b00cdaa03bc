"""AltUp and ResidualStreams: several residual streams. Each layer computes one and corrects the others.

Streams are one tensor, ``[num_streams, num_tokens, hidden_size]``.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from engine.models.config.model_config import ModelConfig
from engine.models.config.shapes.altup import AltUpShape
from engine.models.decoder.norms import RMSNorm
from kernels.layer_ops.base import LayerOps

__all__ = ["AltUp", "ResidualStreams"]

_SMALLEST_SQUARE = 1e-5  # of what is divided by a root mean square


class AltUp(nn.Module):
    """A layer's prediction of the streams, and their correction by what it computed of the active one.

    Alternating updates (Baykal et al., 2023). The coefficients are computed in float32, from a vector of as many
    numbers ("modalities") as there are streams.
    """

    def __init__(self, config: ModelConfig, shape: AltUpShape, ops: LayerOps) -> None:
        super().__init__()
        self.ops, self.shape, count, width = ops, shape, shape.num_streams, config.hidden_size
        self.router_norm = RMSNorm(config, width)
        self.router = nn.Parameter(torch.empty(count, width), False)
        self.predictions = nn.Parameter(torch.empty(count * count, count), False)
        self.corrections = nn.Parameter(torch.empty(count, count), False)
        self.output_scale = nn.Parameter(torch.empty(width), False)

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the prediction of each stream: itself, and a sum of all streams by the active one's modalities."""
        count = self.shape.num_streams
        coefficients = F.linear(self._modalities(streams[self.shape.active]), self.predictions).view(-1, count, count)
        mixed = torch.einsum("toi,ith->oth", coefficients, streams.float())
        return (streams + mixed).type_as(streams)

    def correct(self, predictions: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """Return the streams after the layer.

        Args:
            predictions: of the streams.
            computed: [num_tokens, hidden_size], what the layer computed of the active one.
        """
        factors = 1.0 + F.linear(self._modalities(computed), self.corrections)
        innovation = computed - predictions[self.shape.active]
        return (predictions + innovation * factors.t().unsqueeze(2)).type_as(predictions)

    def output(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the active stream as it gates a layer's own input, [num_tokens, hidden_size]."""
        active = streams[self.shape.active]
        return (active * self.output_scale).type_as(active) if self.shape.scales_output else active

    def _modalities(self, stream: torch.Tensor) -> torch.Tensor:
        """Return float32 [num_tokens, num_streams]."""
        _, normed = self.ops.add_norm(stream, None, self.router_norm)
        return torch.tanh(F.linear(normed.float() / stream.shape[1], self.router))


class ResidualStreams(nn.Module):
    """The streams before the first layer, projected from the embeddings, and the hidden states after the last one."""

    def __init__(self, config: ModelConfig, shape: AltUpShape) -> None:
        super().__init__()
        width = config.hidden_size
        self.projections, self.unembed_projections = (
            nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(1, shape.num_streams)) for _ in range(2)
        )

    def start(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the streams of embeddings [num_tokens, hidden_size]."""
        others = (_with_size_of(embeddings, project(embeddings)) for project in self.projections)
        return torch.stack([embeddings, *others])

    def merge(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the mean of the streams, projected, [num_tokens, hidden_size]."""
        first, *others = streams
        projected = (
            _with_size_of(first, project(stream))
            for project, stream in zip(self.unembed_projections, others, strict=True)
        )
        return torch.stack([first, *projected]).mean(dim=0)


def _with_size_of(reference: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return rows scaled to the root mean square of the reference's, [num_tokens, hidden_size] each."""
    size, own = (rows.float().square().mean(dim=1, keepdim=True) for rows in (reference, values))
    return (values * (size.sqrt() / own.clamp(min=_SMALLEST_SQUARE).sqrt())).type_as(values)
