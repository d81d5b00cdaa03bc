"""What a config says about dense feed-forwards, and about the embeddings that layers have of their own."""

from __future__ import annotations

from collections.abc import Collection
from statistics import NormalDist
from typing import Any

from engine.errors import ModelLoadError, UnsupportedModelError, shown
from engine.models.config.families.table import Family
from engine.models.config.values.limits import read_count, require_integer
from kernels.layer_ops.base import Activation

__all__ = ["dense_activation", "gate_cutoffs", "intermediate_sizes", "per_layer_embedding"]

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def intermediate_sizes(config: Any, shared: Collection[int]) -> tuple[int, dict[int, int]]:
    """Return the features of dense feed-forwards, and those of layers that have other numbers of them.

    Args:
        config: of transformers.
        shared: layers that read the keys and values of others, whose feed-forwards may be twice as wide.

    Raises:
        ModelLoadError: for values that no model has.
    """
    if isinstance(sizes := getattr(config, "intermediate_size", None), list):
        if len(sizes) != config.num_hidden_layers or any(type(size) is not int or size < 1 for size in sizes):
            raise ModelLoadError(
                f"intermediate_size={shown(sizes)} has no integer from 1 for each of {config.num_hidden_layers} "
                "layers; correct config.json"
            )
        return sizes[0], {layer: size for layer, size in enumerate(sizes) if size != sizes[0]}
    size = _intermediate_size(config)
    return size, dict.fromkeys(shared, 2 * size) if getattr(config, "use_double_wide_mlp", False) else {}


def _intermediate_size(config: Any) -> int:
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


def gate_cutoffs(config: Any) -> dict[int, float]:
    """Return the cut-offs of layers whose feed-forwards drop small gates, in standard deviations above a token's mean.

    Gates that are normally distributed are below it as often as the config's activation_sparsity_pattern says
    (statistical top-k, You et al., 2025).

    Raises:
        ModelLoadError: for values that no model has.
    """
    pattern = getattr(config, "activation_sparsity_pattern", None) or []
    if any(isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1 for share in pattern):
        raise ModelLoadError(
            f"activation_sparsity_pattern={shown(pattern)} has other elements than numbers from 0 to below 1; correct "
            "config.json"
        )
    return {layer: NormalDist().inv_cdf(share) for layer, share in enumerate(pattern) if share}


def per_layer_embedding(config: Any, family: Family) -> tuple[int, int]:
    """Return the elements of the embedding that each layer has of each token, 0 if there is none, and its vocabulary.

    In Gemma 3n ids beyond that vocabulary have the embedding of id 0.

    Raises:
        UnsupportedModelError: if another family's vocabulary is not the model's, or its gates are not GELUs.
    """
    width, size = read_count(config, "hidden_size_per_layer_input"), config.vocab_size
    if not width:
        return 0, size
    if family.has_altup:
        size = require_integer(config, "vocab_size_per_layer_input")
    elif config.vocab_size_per_layer_input != size:
        raise UnsupportedModelError(
            f"vocab_size_per_layer_input={config.vocab_size_per_layer_input} is supported only if it is "
            f"vocab_size={config.vocab_size}; correct config.json"
        )
    if dense_activation(config, family) != "gelu_tanh":
        raise UnsupportedModelError(
            f"{family.activation_field}='{getattr(config, family.activation_field)}' is not supported with "
            f"hidden_size_per_layer_input={width}; supported: gelu_pytorch_tanh"
        )
    return width, size


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
