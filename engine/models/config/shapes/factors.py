"""read_factors and attention_options: the multipliers and soft-caps of a model, read from a config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.models.config.families.table import Family
from engine.models.config.shapes.latent import LatentShape
from engine.models.config.values.limits import require_number
from kernels.attention.registry import LARGEST_HEAD_DIM
from kernels.attention.window import Chunk, Window

__all__ = ["attention_options", "read_factors"]


def read_factors(config: Any, family: Family, head_dim: int, latent: LatentShape | None) -> dict[str, Any]:
    """Return the fields of ModelConfig that are factors of numbers, or limit them.

    Raises:
        ModelLoadError: if one of them is not a finite number.
    """
    softcap = config.attn_logit_softcapping if family.caps_attention else None
    scale, embedding_multiplier = family.attention_scale or max(head_dim, 1) ** -0.5, 1.0
    if latent is not None:
        scale = latent.attention_scale(config)
    if family.has_query_scalar:
        scale = config.query_pre_attn_scalar**-0.5
    elif family.has_multipliers:
        scale, embedding_multiplier = (require_number(config, f"{of}_multiplier") for of in ("attention", "embedding"))
    if family.scales_embedding:
        embedding_multiplier = config.hidden_size**0.5
    divisor = require_number(config, "logits_scaling") if family.has_multipliers else 1.0
    residual_multiplier = require_number(config, "residual_multiplier") if family.has_multipliers else 1.0
    if family.has_depth_multipliers:
        embedding_multiplier = require_number(config, "scale_emb")
        residual_multiplier = require_number(config, "scale_depth") / config.num_hidden_layers**0.5
        divisor = config.hidden_size / require_number(config, "dim_model_base")
    if family.has_projection_multipliers:
        embedding_multiplier = require_number(config, "embedding_multiplier")
        divisor = 1.0 / require_number(config, "lm_head_multiplier")
    return {
        "embedding_multiplier": embedding_multiplier,
        "attention_scale": scale,
        "attention_softcap": softcap,
        "logits_softcap": config.final_logit_softcapping if family.caps_logits else None,
        "logits_divisor": divisor,
        "residual_multiplier": residual_multiplier,
    }


def attention_options(
    config: Any, family: Family, head_dims: list[int], windows: Iterable[Window | None]
) -> frozenset[str]:
    """Return what the layers need of an attention backend: see ``kernels.attention.registry``."""
    needed = {
        "softcap": family.caps_attention and config.attn_logit_softcapping is not None,
        "large_heads": max(head_dims) > LARGEST_HEAD_DIM,
        "latent": family.has_latents and family.index_rotation is None,
        "sparse": family.index_rotation is not None,
        "chunks": any(isinstance(window, Chunk) for window in windows),
    }
    return frozenset(name for name, is_needed in needed.items() if is_needed)
