"""growth_factors: the factors of queries that grow with their position."""

from __future__ import annotations

import torch

from engine.models.config.shapes.query_growth import QueryGrowth

__all__ = ["growth_factors"]


def growth_factors(growth: QueryGrowth, positions: torch.Tensor) -> torch.Tensor:
    """Return the factors of the queries at ``positions`` [num_tokens], float32."""
    return 1.0 + growth.beta * torch.log1p(((positions + growth.first) // growth.length).float())
