"""mtp_config: the shape of a model's layer of multi-token prediction, as that of a model with one layer."""

from __future__ import annotations

from dataclasses import replace

from engine.models.config.families.mtp_formats import MtpFormat
from engine.models.config.model_config import ModelConfig
from engine.models.config.shapes.heads import LayerHeads

__all__ = ["format_of", "mtp_config"]


def format_of(config: ModelConfig) -> MtpFormat:
    """Return how a model's layer is stored; its family must have one."""
    assert config.family.mtp is not None
    return config.family.mtp


def mtp_config(config: ModelConfig) -> ModelConfig:
    """Return the shape of the layer: as the model's last layer with attention, with experts if the last layer has any.

    Args:
        config: of the whole model, whose family has such layers.
    """
    form, last = format_of(config), config.num_layers - 1
    like = max(layer for layer in range(config.num_layers) if config.mixers[layer] == "attention")
    names = {**config.family.stored_names, **form.stored_names(config.num_layers)}
    sparse = frozenset({0} if config.has_experts(last) else ())
    return replace(
        config,
        family=replace(config.family, prefixes=(form.prefix,), stored_names=names),
        num_layers=1,
        num_mtp_layers=0,
        layer_heads=LayerHeads(),
        windows=(config.windows[like],),
        rope=replace(config.rope, tables=(config.rope.tables[like],)),
        experts=None if config.experts is None or not sparse else replace(config.experts, layers=sparse),
        mixers=("attention",),
        recurrent=None,
        without_feed_forward=frozenset(),
        intermediate_sizes={},
    )
