"""Rotary position embedding (Su et al., 2021) with the scalings that checkpoints ask for.

transformers computes the frequencies of scaled RoPE. This module tabulates cosines and sines for all positions once,
and rotates queries and keys in the half-split layout of the Hugging Face checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["apply_rope", "rope_table"]


def rope_table(hf_config: Any, head_dim: int, length: int) -> torch.Tensor:
    """Return cosines and sines, float32 [length, 2, head_dim // 2], of positions 0 to ``length`` - 1."""
    parameters = hf_config.rope_parameters or {}
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies, factor = 1.0 / (parameters.get("rope_theta", 10000.0) ** exponents), 1.0
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](hf_config, torch.device("cpu"))
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos() * factor, angles.sin() * factor), dim=1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` [num_tokens, num_heads, head_dim] by ``cos`` and ``sin`` [num_tokens, 1, head_dim // 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
