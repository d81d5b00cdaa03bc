"""RopeConfig: which rotary position embedding each layer of a model has, as its config.json says. No tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError, ModelLoadError, UnsupportedModelError, shown
from engine.models.config.families.table import Family

__all__ = ["RopeConfig", "check_longrope_length", "longrope_length", "rope_parameters"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """The rotary position embedding of a model.

    Attributes:
        layer_types: the types of layers that have parameters of their own, each with a table; a single None: all layers
            share one table; empty: no layer has RoPE.
        tables: each layer's index in ``layer_types``; None: the layer has no positions (NoPE).
        rotary_dim: elements of a head that are rotated, the first ones; None: all of them, in any layer.
        rotates_neighbours: elements 2i and 2i + 1 of a head are rotated together, not i and i + rotary_dim / 2.
        longrope_length: positions up to which LongRoPE uses its factors for short contexts; None without LongRoPE.
        has_factor: whether YaRN's factor of cosines and sines counts. It does not where queries and keys are normalized
            after they are rotated (Llama 4), which the decoder does before, as rotating alone changes no norm.
    """

    layer_types: tuple[str | None, ...]
    tables: tuple[int | None, ...]
    rotary_dim: int | None
    rotates_neighbours: bool
    longrope_length: int | None
    has_factor: bool = True

    @classmethod
    def from_hf(cls, config: Any, family: Family, head_dim: int) -> RopeConfig:
        """Read a transformers config.

        Args:
            config: of transformers.
            family: the model's.
            head_dim: elements of a head, or only those with positions where they are apart.

        Raises:
            UnsupportedModelError: for RoPE that the decoder does not compute.
            ModelLoadError: for values that no model has.
        """
        layer_types, tables = _tables(config, family)
        sets = [rope_parameters(config, layer_type) for layer_type in layer_types]
        for parameters in sets:
            rope_type = str(parameters.get("rope_type", "default"))
            if rope_type not in family.rope_types:
                supported = ", ".join(family.rope_types)
                raise UnsupportedModelError(f"rope_type='{rope_type}' is not supported; supported: {supported}")
        if not sets:
            return cls(layer_types=(), tables=tables, rotary_dim=None, rotates_neighbours=False, longrope_length=None)
        fraction = _rotated_part(config, sets[0])
        if family.has_latents and _part_of_head(config, fraction) == head_dim:
            fraction = None  # of a head's keys: the rotated ones are apart from the others
        if not family.rotates_partially and fraction not in (None, 1.0):
            raise UnsupportedModelError(
                f"partial_rotary_factor={shown(fraction)} is not supported: RoPE has to rotate {head_dim} elements of "
                "a head; correct config.json"
            )
        rotary_dim = head_dim
        if fraction is not None:
            rotary_dim = int(head_dim * fraction) if isinstance(fraction, int | float) else 0
        if family.rotates_partially and (rotary_dim % 2 or not 0 < rotary_dim <= head_dim):
            raise ModelLoadError(
                f"partial_rotary_factor={shown(fraction)} rotates {rotary_dim} of a head's {head_dim} elements, which "
                "must be an even number of them; correct config.json"
            )
        return cls(
            layer_types=layer_types,
            tables=tables,
            rotary_dim=None if rotary_dim == head_dim else rotary_dim,
            rotates_neighbours=_rotates_neighbours(config, family),
            longrope_length=longrope_length(sets[0]),
            has_factor=not (family.qk_norm == "unit" and config.use_qk_norm),
        )

    def element_order(self, head_dim: int) -> list[int] | None:
        """Return the stored index of each element of a head as the decoder has it; None: the order is the same.

        The decoder rotates element i with i + head_dim / 2. Products of queries and keys do not depend on the order of
        their elements, so other orders are changed to this one when the weights are loaded. Elements that are not
        rotated follow those that are, half of them in each half. Their cosines are 1 and their sines 0.
        """
        rotary_dim = self.rotary_dim or head_dim
        if rotary_dim == head_dim and not self.rotates_neighbours:
            return None
        half, rest = rotary_dim // 2, (head_dim - rotary_dim) // 2
        step = 2 if self.rotates_neighbours else 1
        first = [step * i for i in range(half)]
        second = [i + 1 if self.rotates_neighbours else i + half for i in first]
        others = range(rotary_dim, head_dim)
        return [*first, *others[:rest], *second, *others[rest:]]


def _rotated_part(config: Any, parameters: dict[str, Any]) -> Any:
    """Return which part of a head is rotated; None: all of it, if only by angles of zero, as in proportional RoPE."""
    if parameters.get("rope_type") == "proportional":
        return None
    return parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))


def _part_of_head(config: Any, fraction: Any) -> int | None:
    """Return how many elements of a head of ``head_dim`` elements this part is; None: no number."""
    head_dim = getattr(config, "head_dim", None)
    return int(head_dim * fraction) if type(head_dim) is int and type(fraction) in (int, float) else None


def rope_parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    """Return the RoPE parameters of a transformers config, or those of one type of layers.

    Raises:
        ModelLoadError: if there are none for this type.
    """
    parameters: dict[str, Any] = config.rope_parameters or {}
    if layer_type is None:
        return parameters
    if not isinstance(own := parameters.get(layer_type), dict):
        raise ModelLoadError(f"rope_parameters={shown(parameters)} has none for '{layer_type}'; correct config.json")
    return own


def longrope_length(parameters: dict[str, Any]) -> int | None:
    """Return up to how many positions LongRoPE uses its factors for short contexts; None for RoPE of another kind.

    Raises:
        ModelLoadError: if the parameters have no such number.
    """
    if parameters.get("rope_type") != "longrope":
        return None
    length = parameters.get("original_max_position_embeddings")
    if type(length) is not int or length < 1:
        raise ModelLoadError(
            f"original_max_position_embeddings={shown(length)} is not an integer from 1, and LongRoPE needs it; "
            "correct config.json"
        )
    return length


def check_longrope_length(longrope_length: int | None, max_model_len: int) -> None:
    """Raise ConfigError if contexts may be longer than LongRoPE's factors for short contexts allow.

    transformers chooses the factors by the longest request of a batch, so one request would change the others.
    """
    if longrope_length is not None and max_model_len > longrope_length:
        raise ConfigError(
            f"exceeds the {longrope_length} positions that LongRoPE has the same factors for",
            param="max_model_len",
            value=max_model_len,
            remedy=f"set {longrope_length} or less",
        )


def _rotates_neighbours(config: Any, family: Family) -> bool:
    return bool(config.rope_interleave) if family.rotates_neighbours is None else family.rotates_neighbours


def _has_rope(config: Any, family: Family) -> bool:
    match family.has_rope:
        case "optional":
            return bool(config.position_embedding_type == "rope")
        case "with_theta":
            return rope_parameters(config, None).get("rope_theta") is not None
    return family.has_rope == "always"


def _tables(config: Any, family: Family) -> tuple[tuple[str | None, ...], tuple[int | None, ...]]:
    """Return ``layer_types`` and ``tables``."""
    if not _has_rope(config, family):
        return (), (None,) * config.num_hidden_layers
    if family.has_rope_by_layer_type:
        layer_types = sorted(set(config.layer_types))
        return tuple(layer_types), tuple(layer_types.index(kind) for kind in config.layer_types)
    count: int = config.num_hidden_layers
    if not family.has_unrotated_layers:
        return (None,), (0,) * count
    rotated = config.no_rope_layers
    if not isinstance(rotated, list) or len(rotated) < count or any(type(flag) is not int for flag in rotated):
        raise ModelLoadError(
            f"no_rope_layers={shown(rotated)} has no number for each of {count} layers; correct config.json"
        )
    return (None,), tuple(0 if flag else None for flag in rotated[:count])
