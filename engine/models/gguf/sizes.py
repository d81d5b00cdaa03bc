"""Sizes of layers and heads that a GGUF file's metadata says, for the config of any architecture."""

from __future__ import annotations

from typing import Any

from engine.models.gguf.fields import Fields
from engine.models.gguf.file import GgufFile
from engine.models.gguf.rope import rope_parameters

__all__ = ["has", "head_dim_of", "key_length", "layer_types", "num_layers", "whole_rope"]

_MAX_LAYERS = 512


def num_layers(fields: Fields) -> int:
    """Return the number of layers, which lists are made of."""
    count = fields.integer("block_count")
    if count > _MAX_LAYERS:
        raise fields.error(f"{fields.architecture}.block_count={count} is more than any model has; download it again")
    return count


def head_dim_of(fields: Fields) -> int:
    """Return the elements of a head's key."""
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    return fields.integer("attention.key_length", max(1, hidden // heads))


def key_length(fields: Fields) -> int:
    """Return the elements of a head's key; raise ModelLoadError unless its value has as many."""
    head_dim = head_dim_of(fields)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.error("its keys and values differ in size, which is not supported; give another model")
    return head_dim


def whole_rope(fields: Fields) -> dict[str, Any]:
    """Return the parameters of RoPE over whole heads."""
    head_dim = head_dim_of(fields)
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise fields.error(
            f"{fields.architecture}.rope.dimension_count is not the head's {head_dim} elements, which is not "
            "supported; give another model"
        )
    return rope_parameters(fields, head_dim)


def layer_types(fields: Fields, period: int) -> list[str]:
    """Return which layers slide: all but each ``period``-th, unless the file has a pattern of its own."""
    count, pattern = num_layers(fields), fields.raw("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == count and all(type(slides) is bool for slides in pattern):
        flags = pattern
    else:
        period = period if pattern is None else fields.integer("attention.sliding_window_pattern")
        flags = [bool((layer + 1) % period) for layer in range(count)]
    return ["sliding_attention" if slides else "full_attention" for slides in flags]


def has(gguf: GgufFile, name: str) -> bool:
    """Return whether the first layer has a tensor."""
    return f"blk.0.{name}" in gguf.tensors
