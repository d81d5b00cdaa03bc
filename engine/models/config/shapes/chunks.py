"""Chunked attention, as Llama 4 has it: up to the length of one chunk it is full attention, and more is not served.

Llama 4 also scales the queries of layers without positions, from ``floor_scale`` tokens on. Its relatives without
either, such as MobileLLM-R1, are served in full.
"""

from __future__ import annotations

from typing import Any

from engine.models.config.values.limits import require_integer

__all__ = ["CHUNKED", "chunk_length", "within_one_chunk"]

CHUNKED = "chunked_attention"
_SCALES = "attn_temperature_tuning"


def chunk_length(config: Any) -> int | None:
    """Return how many positions the model has before chunks or scales change its attention; None if nothing does.

    Raises:
        ModelLoadError: if the config's sizes are not integers from 1.
    """
    lengths = []
    if CHUNKED in (getattr(config, "layer_types", None) or ()):
        lengths.append(require_integer(config, "attention_chunk_size"))
    if getattr(config, _SCALES, False):
        lengths.append(max(1, require_integer(config, "floor_scale") - 1))
    return min(lengths, default=None)


def within_one_chunk(config: Any) -> None:
    """Change a config of transformers to what it computes up to its ``chunk_length``, without chunks and scales.

    transformers counts the tokens of a step for the scales, not their positions.
    """
    if CHUNKED in (getattr(config, "layer_types", None) or ()):
        config.layer_types = ["full_attention"] * len(config.layer_types)
    if getattr(config, _SCALES, False):
        setattr(config, _SCALES, False)
