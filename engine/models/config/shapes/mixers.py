"""Mixer: what mixes the tokens of a layer, beside its feed-forward; read from the types of layers in a config."""

from __future__ import annotations

from typing import Any, Literal

from engine.errors import ModelLoadError, UnsupportedModelError, shown
from engine.models.config.families.table import Family
from engine.models.config.shapes.recurrent.gated_delta import GatedDeltaShape
from engine.models.config.shapes.recurrent.kimi_delta import KimiDeltaShape
from engine.models.config.shapes.recurrent.mamba import MambaShape
from engine.models.config.shapes.recurrent.short_conv import ConvShape

__all__ = ["Mixer", "RecurrentShape", "layer_types", "read_mixers", "read_recurrent"]

Mixer = Literal["attention", "recurrent", "both", "none"]  # both: side by side, their outputs are added
RecurrentShape = GatedDeltaShape | KimiDeltaShape | MambaShape | ConvShape

_MIXERS: dict[str, Mixer] = {
    "full_attention": "attention",
    "sliding_attention": "attention",
    "chunked_attention": "attention",
    "indexed_attention": "attention",
    "linear_attention": "recurrent",
    "conv": "recurrent",
    "hybrid": "both",
    "moe": "none",
    "mlp": "none",
}
_SHAPES: dict[str, type[RecurrentShape]] = {
    "gated_delta": GatedDeltaShape,
    "kimi_delta": KimiDeltaShape,
    "mamba": MambaShape,
    "conv": ConvShape,
}


def layer_types(config: Any, family: Family) -> list[str] | None:
    """Return the type of each layer; None if the config names none, and all of them have attention.

    Raises:
        UnsupportedModelError: for a type of layers that the family does not have.
        ModelLoadError: if there is no type for each layer.
    """
    types = getattr(config, "layer_types", None)
    if types is None and family.recurrent is None:
        return None
    if not isinstance(types, list) or (family.recurrent is not None and len(types) != config.num_hidden_layers):
        raise ModelLoadError(
            f"layer_types={shown(types)} has no type for each of {config.num_hidden_layers} layers; correct config.json"
        )
    if unknown := set(types) - set(family.layer_types):
        supported = ", ".join(family.layer_types)
        raise UnsupportedModelError(f"a layer of the type '{min(unknown)}' is not supported; supported: {supported}")
    return types


def read_mixers(config: Any, family: Family) -> tuple[Mixer, ...]:
    """Return each layer's mixer; the errors are those of ``layer_types``."""
    types = layer_types(config, family)
    return ("attention",) * config.num_hidden_layers if types is None else tuple(_MIXERS[kind] for kind in types)


def read_recurrent(config: Any, family: Family) -> RecurrentShape | None:
    """Return the shape of a model's recurrent layers, which are alike; None if the family has none.

    Raises:
        ModelLoadError: for sizes that no model has.
    """
    return None if family.recurrent is None else _SHAPES[family.recurrent].from_hf(config)
