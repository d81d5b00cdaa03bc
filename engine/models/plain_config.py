"""plain_config: reads the config.json of a common checkpoint without transformers, whose import takes most of a second.

It knows the fields that checkpoints of our families have and how transformers reads them. It returns None for anything
else: another family, an unknown or missing field, a value of another type, scaled RoPE. Transformers reads those, and
reports what is wrong with them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["plain_config"]

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_Types = tuple[type, ...]
_REQUIRED: dict[str, _Types] = {
    "architectures": (list,),
    "hidden_act": (str,),
    "hidden_size": (int,),
    "intermediate_size": (int,),
    "max_position_embeddings": (int,),
    "model_type": (str,),
    "num_attention_heads": (int,),
    "num_hidden_layers": (int,),
    "num_key_value_heads": (int,),
    "rms_norm_eps": (float,),
    "vocab_size": (int,),
    "eos_token_id": (int, list, type(None)),
}
_OPTIONAL: dict[str, _Types] = {
    "attention_bias": (bool,),
    "dtype": (str,),
    "head_dim": (int,),
    "layer_types": (list,),
    "mlp_bias": (bool,),
    "rope_parameters": (dict,),
    "rope_scaling": (type(None),),
    "rope_theta": (int, float),
    "sliding_window": (int, type(None)),
    "tie_word_embeddings": (bool,),
    "torch_dtype": (str,),
    "use_sliding_window": (bool,),
}
_WITHOUT_EFFECT: dict[str, _Types] = {  # on what the decoder computes
    "attention_dropout": (int, float),
    "bos_token_id": (int, type(None)),
    "initializer_range": (float,),
    "max_window_layers": (int,),
    "pad_token_id": (int, type(None)),
    "pretraining_tp": (int,),
    "transformers_version": (str,),
    "use_cache": (bool,),
}
_KNOWN = _REQUIRED | _OPTIONAL | _WITHOUT_EFFECT


def plain_config(raw: dict[str, Any]) -> SimpleNamespace | None:
    """Return what transformers would read from the fields ``raw`` of a config.json, or None if it has to read them.

    The result has the attributes that ``ModelConfig.from_hf``, ``rope_table`` and ``GenerationDefaults`` read.
    """
    if any(name not in raw for name in _REQUIRED) or any(
        name not in _KNOWN or type(value) not in _KNOWN[name] for name, value in raw.items()
    ):
        return None
    rope_theta, dtype, windows = _rope_theta(raw), _dtype(raw), _sliding_window(raw)
    if rope_theta is None or dtype is None or windows is None or not _is_usual(raw):
        return None
    read = {name: raw[name] for name in raw if name not in _WITHOUT_EFFECT}
    return SimpleNamespace(
        **(
            read
            | windows
            | {"rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"}, "dtype": dtype}
            | {"tie_word_embeddings": raw.get("tie_word_embeddings", False)}
        )
    )


def _is_usual(raw: dict[str, Any]) -> bool:
    """Return whether no value depends on a default that differs between families, or on transformers' checks."""
    eos = raw["eos_token_id"]
    sizes = [value for name, value in raw.items() if name.startswith(("num_", "hidden_size", "head_dim"))]
    return (
        raw["model_type"] in _FAMILIES
        and all(size > 0 for size in sizes)
        and all(type(name) is str for name in raw["architectures"])
        and all(type(token_id) is int for token_id in (eos if isinstance(eos, list) else ()))
        and 0.0 <= raw.get("initializer_range", 0.0) <= 1.0
        and raw["hidden_size"] % raw["num_attention_heads"] == 0
        and raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"]) % 2 == 0
        and (raw["model_type"] != "qwen3" or "head_dim" in raw)
    )


def _rope_theta(raw: dict[str, Any]) -> float | None:
    """Return the base of unscaled RoPE, in its new or its old field; None if RoPE is scaled or the base is missing."""
    parameters = raw.get("rope_parameters")
    if parameters is None:
        return raw.get("rope_theta")
    theta = parameters.get("rope_theta")
    is_plain = set(parameters) <= {"rope_theta", "rope_type"} and parameters.get("rope_type", "default") == "default"
    return theta if is_plain and "rope_theta" not in raw and type(theta) in (int, float) else None


def _dtype(raw: dict[str, Any]) -> torch.dtype | None:
    """Return the checkpoint's dtype, in its new or its old field; None unless exactly one is there."""
    names = [raw[name] for name in ("dtype", "torch_dtype") if name in raw]
    return _DTYPES.get(names[0]) if len(names) == 1 else None


def _sliding_window(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields for sliding windows if all layers have one or none has; None otherwise."""
    kinds = raw.get("layer_types")
    if raw.get("use_sliding_window") or (kinds and kinds != ["full_attention"] * raw["num_hidden_layers"]):
        return None
    if raw["model_type"] == "mistral":
        return {"sliding_window": raw["sliding_window"]} if "sliding_window" in raw and kinds is None else None
    if raw["model_type"] == "llama" and raw.get("sliding_window") is not None:
        return None
    return {"sliding_window": None, "layer_types": None}
