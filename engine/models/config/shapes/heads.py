"""KVHeads and LayerHeads: the heads of attention layers, and whose keys and values a layer reads; from a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.errors import ModelLoadError, UnsupportedModelError, shown
from engine.models.config.families.table import Family
from engine.models.config.values.divided import divided
from engine.models.config.values.limits import require_integer

__all__ = ["KVHeads", "LayerHeads", "require_usual_layers", "with_usual_heads"]

_PER_LAYER = {"head_dim", "num_key_value_heads"}


@dataclass(frozen=True, slots=True)
class KVHeads:
    """The heads of a layer's keys and values.

    Attributes:
        count: their number.
        dim: elements of each, and of each query head.
    """

    count: int
    dim: int

    def shard(self, size: int) -> KVHeads:
        """Return the share of one of ``size`` ranks; if there are fewer heads than ranks, they are replicated.

        Raises:
            ConfigError: if the heads cannot be divided by ``size``.
        """
        is_replicated = self.count and size % self.count == 0
        return replace(self, count=1 if is_replicated else divided(self.count, size, "KV heads"))


@dataclass(frozen=True, kw_only=True)
class LayerHeads:
    """How single attention layers differ from a model's others.

    Attributes:
        kv_heads: of layers whose heads have other numbers or sizes.
        values_are_keys: layers without a projection of values: these are the projected keys, before their norm and
            rotation.
        shared: layers that read the keys and values of an earlier one, and that one's index.
    """

    kv_heads: Mapping[int, KVHeads] = field(default_factory=dict)
    values_are_keys: frozenset[int] = frozenset()
    shared: Mapping[int, int] = field(default_factory=dict)

    def shard(self, size: int) -> LayerHeads:
        """Return the heads of one of ``size`` ranks; the errors are those of ``KVHeads.shard``."""
        return replace(self, kv_heads={layer: heads.shard(size) for layer, heads in self.kv_heads.items()})

    @classmethod
    def from_hf(cls, config: Any, family: Family) -> LayerHeads:
        """Read a transformers config.

        Raises:
            ModelLoadError: for values that no model has.
        """
        if not family.has_layer_heads:
            return cls()
        types = list(config.layer_types)
        full = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
        values_are_keys = frozenset(full) if getattr(config, "attention_k_eq_v", False) else frozenset()
        return cls(
            kv_heads={layer: _kv_heads(config, layer) for layer in full},
            values_are_keys=values_are_keys,
            shared=_shared(types, require_integer(config, "num_kv_shared_layers", smallest=0)),
        )


def require_usual_layers(config: Any, family: Family) -> None:
    """Raise UnsupportedModelError if layers differ in fields of a transformers config that they have in common here."""
    if not getattr(config, "is_heterogeneous", False):
        return
    names = {name for own in config.to_dict()["per_layer_config"].values() for name in own}
    if other := names - (_PER_LAYER if family.has_layer_heads else set()):
        raise UnsupportedModelError(
            f"config.json has a per_layer_config with {', '.join(sorted(other))}, which is not supported; "
            "docs/models.md lists what is served"
        )


def with_usual_heads(config: Any, family: Family) -> Any:
    """Return a transformers config whose numbers and sizes of heads are those of layers with a sliding window."""
    if not family.has_layer_heads:
        return config
    sliding = (layer for layer, kind in enumerate(config.layer_types) if kind == "sliding_attention")
    return config.per_layer_config[next(sliding, 0)]


def _kv_heads(config: Any, layer: int) -> KVHeads:
    own = config.per_layer_config[layer]
    heads = KVHeads(require_integer(own, "num_key_value_heads"), require_integer(own, "head_dim"))
    if heads.dim % 2 or config.num_attention_heads % heads.count:
        raise ModelLoadError(
            f"global_head_dim={heads.dim} must be even, and num_global_key_value_heads={heads.count} a divisor of "
            f"num_attention_heads={config.num_attention_heads}; correct config.json"
        )
    return heads


def _shared(types: list[str], num_shared: int) -> dict[int, int]:
    """Return the source of each of the last ``num_shared`` layers: the last earlier layer of its type with its own."""
    first = len(types) - num_shared
    last = {kind: layer for layer, kind in enumerate(types[: max(first, 0)])}
    if missing := set(types[max(first, 0) :]) - set(last):
        raise ModelLoadError(
            f"num_kv_shared_layers={shown(num_shared)} of {len(types)} layers leaves no {min(missing)} layer with keys "
            "and values of its own; correct config.json"
        )
    return {layer: last[types[layer]] for layer in range(first, len(types))}
