"""What a config says about dense feed-forwards, and about the embeddings that layers have of their own."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.models.config.families.table import Family
from engine.models.config.values.limits import read_count, require_integer
from kernels.layer_ops.base import Activation

__all__ = ["dense_activation", "intermediate_size", "per_layer_width"]

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def intermediate_size(config: Any) -> int:
    """Return the features of dense feed-forwards; 0 if a config names none, because no layer has one."""
    if hasattr(config, "shared_intermediate_size"):  # Granite 4, whose intermediate_size is that of experts
        return require_integer(config, "shared_intermediate_size")
    if hasattr(config, "intermediate_size_mlp"):  # Llama 4, whose intermediate_size is that of experts, too
        return require_integer(config, "intermediate_size_mlp")
    size = require_integer(config, "intermediate_size") if hasattr(config, "intermediate_size") else 0
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return size
    size = int(2 * size / 3)  # LFM2
    if config.block_ffn_dim_multiplier is None:
        return size
    multiple = require_integer(config, "block_multiple_of")
    return -(-int(config.block_ffn_dim_multiplier * size) // multiple) * multiple


def per_layer_width(config: Any) -> int:
    """Return the elements of the embedding that each layer has of each token; 0 if there is none.

    Raises:
        UnsupportedModelError: if its vocabulary is another one.
    """
    width = read_count(config, "hidden_size_per_layer_input")
    if width and config.vocab_size_per_layer_input != config.vocab_size:
        raise UnsupportedModelError(
            f"vocab_size_per_layer_input={config.vocab_size_per_layer_input} is supported only if it is "
            f"vocab_size={config.vocab_size}; correct config.json"
        )
    return width


def dense_activation(config: Any, family: Family) -> Activation:
    """Return the activation of dense feed-forwards; of those without a gate it has no meaning.

    Raises:
        UnsupportedModelError: for one that the decoder does not compute.
    """
    name = getattr(config, family.activation_field, "silu")
    if not family.has_feed_forward_gate:
        if name != "relu2":
            raise UnsupportedModelError(f"{family.activation_field}='{name}' is not supported; supported: relu2")
        return "silu"  # of no layer
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{family.activation_field}='{name}' is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]
