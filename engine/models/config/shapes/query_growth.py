"""QueryGrowth: a factor of queries that grows with their position, read from a config. No tensors."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from engine.models.config.values.limits import require_integer, require_number

__all__ = ["QueryGrowth"]


@dataclass(frozen=True, kw_only=True)
class QueryGrowth:
    """The factor of a query: 1 + beta * log(1 + (position + first) // length) (Llama 4, 2025).

    It counters that the softmax of a longer context is flatter.

    Attributes:
        first: of the first position.
    """

    beta: float
    length: int
    first: int = 0

    @classmethod
    def of_rope(cls, config: Any) -> QueryGrowth | None:
        """Read the RoPE parameters of a transformers config (Mistral 4); None if they name no growth.

        Raises:
            ModelLoadError: for values that are not numbers.
        """
        parameters = config.rope_parameters or {}
        if parameters.get("llama_4_scaling_beta") is None:
            return None
        values = SimpleNamespace(**parameters)
        return cls(
            beta=require_number(values, "llama_4_scaling_beta"),
            length=require_integer(values, "original_max_position_embeddings"),
        )

    @classmethod
    def of_temperature(cls, config: Any) -> QueryGrowth | None:
        """Read the fields of Llama 4's config; None if queries have no factor.

        Raises:
            ModelLoadError: for values that are not numbers.
        """
        if not config.attn_temperature_tuning:
            return None
        beta, length = require_number(config, "attn_scale"), require_integer(config, "floor_scale")
        return cls(beta=beta, length=length, first=1)
