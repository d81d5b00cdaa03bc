"""CpuStreams: what ResidualStreams computes, by the C kernels on packed weights."""

from __future__ import annotations

import torch

from engine.models.config.shapes.altup import AltUpShape
from kernels.cpu.altup import match_rows
from kernels.cpu.linear import PackedLinear, WeightKind, linear

__all__ = ["CpuStreams"]


class CpuStreams:
    """The residual streams of a step, float32 [num_streams, num_tokens, hidden_size].

    Args:
        shape: of the streams.
        hidden_size: elements of a token in a stream.
        kind: the type of the packed weights.
    """

    def __init__(self, shape: AltUpShape, hidden_size: int, kind: WeightKind) -> None:
        self._projections: dict[str, list[PackedLinear]] = {
            name: [PackedLinear(kind, hidden_size, hidden_size) for _ in range(1, shape.num_streams)]
            for name in ("projections", "unembed_projections")
        }

    @property
    def num_bytes(self) -> int:
        """Bytes that the packed weights take."""
        return sum(weight.num_bytes for weights in self._projections.values() for weight in weights)

    def set_weight(self, module: str, index: int, weight: torch.Tensor) -> None:
        """Set the weights of a projection, by its module's name and index in ResidualStreams."""
        self._projections[module][index].set_weight(weight)

    def start(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the streams of embeddings, float32 [num_tokens, hidden_size]."""
        projections = self._projections["projections"]
        streams = embeddings.new_empty(1 + len(projections), *embeddings.shape)
        streams[0] = embeddings
        for stream, projection in zip(streams[1:], projections, strict=True):
            stream.copy_(linear(embeddings, projection))
            match_rows(stream, embeddings)
        return streams

    def merge(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the mean of the streams, projected, [num_tokens, hidden_size]."""
        total = streams[0].clone()
        for stream, projection in zip(streams[1:], self._projections["unembed_projections"], strict=True):
            projected = linear(stream, projection)
            match_rows(projected, streams[0])
            total += projected
        return total / len(streams)
