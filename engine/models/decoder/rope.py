"""Rotary position embedding (Su et al., 2021) with the scalings that checkpoints ask for.

transformers computes the frequencies of scaled RoPE. This module tabulates cosines and sines for all positions once;
kernels rotate queries and keys with them, in the half-split layout of the Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.errors import ConfigError, ModelLoadError
from engine.models.checkpoint.finite import is_finite
from engine.models.config.shapes.rope import RopeConfig, rope_parameters

__all__ = ["rope_tables"]


_MAX_BYTES = 4 * 2**30


def rope_tables(hf_config: Any, rope: RopeConfig, widths: Sequence[int], length: int) -> list[torch.Tensor]:
    """Return the cosines and sines of positions 0 to ``length`` - 1, for each of ``rope``'s layer types.

    float32 [length, 2, width // 2] each, in the order of ``rope.element_order``.

    Args:
        hf_config: of transformers.
        rope: read from it.
        widths: elements of the heads that each table rotates.
        length: positions.

    Raises:
        ConfigError: if the tables of a context of this length take too much memory.
        ModelLoadError: if the config's parameters cannot be computed with, or the angles are not finite.
    """
    bytes_per_token = 4 * sum(widths)
    if (num_bytes := bytes_per_token * length) > _MAX_BYTES:
        raise ConfigError(
            f"takes {num_bytes / 1e9:.0f} GB for the angles of RoPE",
            param="max_model_len",
            value=length,
            remedy=f"set {_MAX_BYTES // bytes_per_token} or less",
        )
    tables = [torch.zeros(length, 2, width // 2) for width in widths]
    try:
        for table, layer_type, width in zip(tables, rope.layer_types, widths, strict=True):
            table[:, 0] = 1.0  # elements that are not rotated
            rotary_dim = rope.rotary_dim or width
            frequencies, factor = _frequencies(hf_config, layer_type, rotary_dim)
            factor = factor if rope.has_factor else 1.0
            if len(frequencies) != rotary_dim // 2:  # else torch would resize the table
                raise ValueError(f"{len(frequencies)} frequencies for {rotary_dim} elements that are rotated")
            angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
            rotated = table[:, :, : rotary_dim // 2]
            torch.stack((angles.cos() * factor, angles.sin() * factor), dim=1, out=rotated)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"the rope_parameters of config.json cannot be computed with: {error!r}; correct them"
        ) from error
    if not all(map(is_finite, tables)):
        raise ModelLoadError("the rope_parameters of config.json result in angles that are not finite; correct them")
    return tables


def _frequencies(hf_config: Any, layer_type: str | None, rotary_dim: int) -> tuple[torch.Tensor, float]:
    """Return radians per position, float32 [rotary_dim // 2], and a factor of the cosines and sines."""
    parameters = rope_parameters(hf_config, layer_type)
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "default":
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return 1.0 / (parameters.get("rope_theta", 10000.0) ** exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    options = {} if layer_type is None else {"layer_type": layer_type}
    frequencies: torch.Tensor
    factor: float
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](hf_config, torch.device("cpu"), **options)
    return frequencies, factor
