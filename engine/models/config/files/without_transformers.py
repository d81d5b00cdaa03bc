"""plain_config: reads the config.json of a common checkpoint without transformers, whose import takes most of a second.

It knows the fields that checkpoints of our families have and how transformers reads them (transformers_defaults.py).
It returns None for anything else: another family, an unknown or missing field, a value of another type, scaled RoPE.
Transformers reads those, and reports what is wrong with them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from engine.models.config.families.transformers_defaults import FAMILIES, KNOWN, WITHOUT_EFFECT, PlainFamily

__all__ = ["plain_config"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_EXPERTS = ("num_experts", "num_local_experts")  # two names of one field, except in Qwen2-MoE
_POSITIVE = ("decoder_sparse_step", "no_rope_layer_interval", "query_pre_attn_scalar", "sliding_window_pattern")


def plain_config(raw: dict[str, Any]) -> SimpleNamespace | None:
    """Return what transformers would read from the fields ``raw`` of a config.json, or None if it has to read them.

    The result has the attributes that ``ModelConfig.from_hf``, ``TransformersConfig.from_hf``, ``rope_tables`` and
    ``GenerationDefaults`` read.
    """
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or not _has_known_fields(raw, family) or not _is_usual(raw, family):
        return None
    parts = (_windows(raw, family), _experts(raw, family), _unrotated_layers(raw, family))
    rope, dtype = _rope(raw, family), _dtype(raw)
    if rope is None or dtype is None or None in parts:
        return None
    fields = {"tie_word_embeddings": False} | dict(family.defaults)
    fields |= {name: raw[name] for name in raw if name not in WITHOUT_EFFECT}
    for part in parts:
        fields |= part or {}
    if model_type == "gemma" and raw["hidden_act"] == "gelu":
        fields["hidden_act"] = "gelu_pytorch_tanh"  # what its first releases meant
    return SimpleNamespace(**(fields | {"rope_parameters": rope, "dtype": dtype}))


def _has_known_fields(raw: dict[str, Any], family: PlainFamily) -> bool:
    """Return whether every field that the family needs is there, and each one is known and of its type."""
    required = family.required_fields
    types = KNOWN | required
    return all(name in raw for name in required) and all(
        name in types and type(value) in types[name] for name, value in raw.items()
    )


def _is_usual(raw: dict[str, Any], family: PlainFamily) -> bool:
    """Return whether no value depends on transformers' checks, or is one that our checks refuse."""
    eos = raw["eos_token_id"]
    sizes = [
        value
        for name, value in raw.items()
        if name.startswith(("num_", "hidden_size", "head_dim")) or name in _POSITIVE
    ]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    return (
        raw["architectures"] == [family.architecture]
        and all(size is None or size > 0 for size in sizes)
        and all(type(token_id) is int for token_id in (eos if isinstance(eos, list) else ()))
        and 0.0 <= raw.get("initializer_range", 0.0) <= 1.0
        and raw["hidden_size"] % raw["num_attention_heads"] == 0
        and head_dim % 2 == 0
        and not raw.get("use_bidirectional_attention")
    )


def _dtype(raw: dict[str, Any]) -> torch.dtype | None:
    """Return the checkpoint's dtype, in its new or its old field; None unless exactly one is there."""
    names = [raw[name] for name in ("dtype", "torch_dtype") if name in raw]
    return _DTYPES.get(names[0]) if len(names) == 1 else None


def _experts(raw: dict[str, Any], family: PlainFamily) -> dict[str, Any] | None:
    """Return the fields of experts that have two names or a list; None if they are not plain."""
    if not family.family.has_experts:
        return {} if not any(name in raw for name in (*_EXPERTS, "mlp_only_layers")) else None
    counts = [raw[name] for name in _EXPERTS if name in raw]
    dense = raw.get("mlp_only_layers") or []
    if len(counts) != 1 or any(type(layer) is not int for layer in dense):
        return None
    return {"num_experts": counts[0]}


def _unrotated_layers(raw: dict[str, Any], family: PlainFamily) -> dict[str, Any] | None:
    """Return which layers have RoPE, if the family has layers without it; None if that is not plain."""
    if not family.family.has_unrotated_layers:
        return {}
    count, interval = raw["num_hidden_layers"], raw.get("no_rope_layer_interval", 4)
    rotated = raw.get("no_rope_layers", [int((layer + 1) % interval != 0) for layer in range(count)])
    is_plain = len(rotated) == count and all(type(flag) is int for flag in rotated)
    return {"no_rope_layers": rotated} if is_plain else None


# --- windows ------------------------------------------------------------------------------------------------------


def _windows(raw: dict[str, Any], family: PlainFamily) -> dict[str, Any] | None:
    """Return the fields of sliding windows; None if they are not plain."""
    kinds, count = raw.get("layer_types"), raw["num_hidden_layers"]
    if family.windows == "by_layer_type":
        every = raw.get("sliding_window_pattern", family.full_attention_every)
        if kinds is None:
            kinds = [_SLIDING if (layer + 1) % every else _FULL for layer in range(count)]
        is_plain = len(kinds) == count and all(kind in (_FULL, _SLIDING) for kind in kinds)
        return {"layer_types": kinds} if is_plain else None
    if raw.get("use_sliding_window") or (kinds is not None and kinds != [_FULL] * count):
        return None
    if family.windows == "everywhere":
        return {} if kinds is None else None
    if family.windows == "never" and raw.get("sliding_window") is not None:
        return None
    return {"sliding_window": None, "layer_types": None}


# --- RoPE ---------------------------------------------------------------------------------------------------------


def _rope(raw: dict[str, Any], family: PlainFamily) -> dict[str, Any] | None:
    """Return the parameters of unscaled RoPE, from their new or their old fields; None if they are not plain."""
    own = family.family
    if "partial_rotary_factor" in raw and not own.rotates_partially:
        return None
    if own.has_rope_by_layer_type:
        return _rope_by_layer_type(raw, family)
    rope = _unscaled(raw.get("rope_parameters", {"rope_theta": raw.get("rope_theta")}), own.rotates_partially)
    if rope is None or ("rope_parameters" in raw and "rope_theta" in raw):
        return None
    if own.rotates_partially:
        part = raw.get("partial_rotary_factor", family.rotated_part)
        rope.setdefault("partial_rotary_factor", part)
        if not 0 < rope["partial_rotary_factor"] <= 1:
            return None
    return rope


def _rope_by_layer_type(raw: dict[str, Any], family: PlainFamily) -> dict[str, Any] | None:
    """Return the parameters of each type of layers."""
    old = {"rope_theta", "rope_local_base_freq"} & set(raw)
    if "rope_parameters" not in raw:
        local = raw.get("rope_local_base_freq", family.local_rope_theta)
        sets = {_FULL: {"rope_theta": raw.get("rope_theta")}, _SLIDING: {"rope_theta": local}}
    else:
        sets = raw["rope_parameters"]
        if old or set(sets) != {_FULL, _SLIDING}:
            return None
    read = {kind: _unscaled(parameters) for kind, parameters in sets.items()}
    return None if None in read.values() else read


def _unscaled(parameters: Any, may_be_partial: bool = False) -> dict[str, Any] | None:
    """Return a set of parameters if it has only the base, and maybe the part that is rotated; else None."""
    if not isinstance(parameters, dict) or parameters.get("rope_type", "default") != "default":
        return None
    numbers = {"rope_theta", "partial_rotary_factor"} if may_be_partial else {"rope_theta"}
    given = {name: value for name, value in parameters.items() if name != "rope_type"}
    is_plain = "rope_theta" in given and set(given) <= numbers
    if not is_plain or any(type(value) not in (int, float) for value in given.values()):
        return None
    return given | {"rope_type": "default"}
