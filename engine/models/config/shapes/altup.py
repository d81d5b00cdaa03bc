"""AltUpShape: the residual streams of a model with alternating updates, read from a config. No tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import ModelLoadError, shown
from engine.models.config.values.limits import require_integer

__all__ = ["AltUpShape"]


@dataclass(frozen=True, kw_only=True)
class AltUpShape:
    """Alternating updates (AltUp, Baykal et al., 2023) as Gemma 3n has them.

    A layer predicts all residual streams, computes attention and feed-forward on one of them, and corrects the others
    by how far its prediction was off.

    Attributes:
        num_streams: residual streams.
        active: the one that layers compute.
        scales_output: a vector multiplies the active stream before it gates a layer's own input.
        laurel_rank: width of the low-rank branch beside attention (LAuReL, Menghani et al., 2025).
    """

    num_streams: int
    active: int
    scales_output: bool
    laurel_rank: int

    @classmethod
    def from_hf(cls, config: Any) -> AltUpShape:
        """Read a transformers config.

        Raises:
            ModelLoadError: for values that no model has.
        """
        num_streams = require_integer(config, "altup_num_inputs")
        active = require_integer(config, "altup_active_idx", smallest=0)
        if active >= num_streams:
            raise ModelLoadError(
                f"altup_active_idx={shown(active)} is not one of altup_num_inputs={num_streams}; correct config.json"
            )
        return cls(
            num_streams=num_streams,
            active=active,
            scales_output=bool(config.altup_correct_scale),
            laurel_rank=require_integer(config, "laurel_rank"),
        )
