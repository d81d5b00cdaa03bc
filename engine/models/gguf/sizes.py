"""Sizes of layers and heads that a GGUF file's metadata says, for the config of any architecture."""

from __future__ import annotations

from typing import Any

from engine.models.gguf.fields import Fields
from engine.models.gguf.file import GgufFile
from engine.models.gguf.rope import rope_parameters

__all__ = ["has", "head_dim_of", "key_length", "num_layers", "whole_rope"]

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


def has(gguf: GgufFile, name: str) -> bool:
    """Return whether the first layer has a tensor."""
    return f"blk.0.{name}" in gguf.tensors
