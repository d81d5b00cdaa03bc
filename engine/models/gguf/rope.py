"""rope_parameters: the RoPE that a GGUF file describes, with transformers' names."""

from __future__ import annotations

import math
from typing import Any

from engine.models.gguf.fields import Fields

__all__ = ["longrope_parameters", "rope_parameters"]

_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192  # of every published Llama 3; llama.cpp's converter knows no others
_TOLERANCE = 1e-4
_YARN = {  # transformers' names of further parameters
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


def rope_parameters(fields: Fields, rotary_dim: int) -> dict[str, Any]:
    """Return ``rope_parameters`` as a config.json has them.

    Args:
        fields: the file's metadata.
        rotary_dim: elements of a head that are rotated.

    Raises:
        ModelLoadError: for a scaling that is unknown or incomplete.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.positive("rope.freq_base", 10000.0)}
    factors = fields.tensor("rope_freqs.weight", rotary_dim // 2)
    if factors is not None and any(factor != 1.0 for factor in factors):
        return rope | _llama3(fields, factors, rope["rope_theta"], rotary_dim)
    kind = fields.raw("rope.scaling.type")
    if kind in (None, "none"):
        return rope
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": fields.positive("rope.scaling.factor")}
    if kind == "yarn":
        further = {name: fields.number(key) for key, name in _YARN.items() if key in fields}
        original = fields.integer("rope.scaling.original_context_length")
        factor = fields.positive("rope.scaling.factor")
        return rope | further | {
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original
        }  # fmt: skip
    raise fields.error(f"{fields.architecture}.rope.scaling.type={kind!r} is not supported; give another model")


def longrope_parameters(fields: Fields, rotary_dim: int) -> dict[str, Any] | None:
    """Return the parameters of LongRoPE, whose factors are tensors; None if the file has none."""
    short = fields.tensor("rope_factors_short.weight", rotary_dim // 2)
    long = fields.tensor("rope_factors_long.weight", rotary_dim // 2)
    if short is None or long is None:
        return None
    return {
        "rope_type": "longrope",
        "rope_theta": fields.positive("rope.freq_base", 10000.0),
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length"),
    }


def _llama3(fields: Fields, factors: list[float], theta: float, rotary_dim: int) -> dict[str, Any]:
    """Return the parameters of Llama 3's scaling, which the factors of the frequencies are the result of."""
    factor = round(max(factors), 4)
    computed = _llama3_factors(theta, rotary_dim, factor)
    if any(abs(stored / ours - 1) > _TOLERANCE for stored, ours in zip(factors, computed, strict=True)):
        raise fields.error(
            "the factors in its tensor 'rope_freqs.weight' are not those of Llama 3's scaling of RoPE, which is not "
            "supported; give another model"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def _llama3_factors(theta: float, rotary_dim: int, factor: float) -> list[float]:
    """Return what Llama 3's scaling divides each frequency by."""
    factors = []
    for i in range(0, rotary_dim, 2):
        turns = _ORIGINAL / (2 * math.pi * theta ** (i / rotary_dim))  # within the original context
        smooth = min(max((turns - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
