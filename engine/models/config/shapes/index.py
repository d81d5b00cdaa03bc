"""IndexShape: the sizes of the indexer of sparse latent attention, and which layers have one; read from a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import ModelLoadError, UnsupportedModelError, shown
from engine.kv.layer_cache import IndexKey
from engine.models.config.families.table import IndexRotation
from engine.models.config.values.limits import require_integer

__all__ = ["IndexShape"]

_NORM_EPS = 1e-6  # of every family, whatever rms_norm_eps is


@dataclass(frozen=True, kw_only=True)
class IndexShape:
    """The indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, 2025), which chooses the tokens that a query attends to.

    The first elements of its keys and queries are rotated, as many as latent attention rotates.

    Attributes:
        num_heads: of its queries; all read one key.
        head_dim: elements of a query or key.
        top_k: tokens that a query attends to at most.
        layers: that have an indexer; a layer without one attends to what the last layer before it chose (GLM-5.2).
        rotation: how RoPE pairs the elements that it rotates, as the checkpoint has them.
        norm_eps: of the LayerNorm of keys.
    """

    num_heads: int
    head_dim: int
    top_k: int
    layers: frozenset[int]
    rotation: IndexRotation
    norm_eps: float = _NORM_EPS

    @property
    def cache(self) -> IndexKey:
        """What a layer with an indexer caches beside its latents."""
        return IndexKey(self.head_dim)

    @classmethod
    def from_hf(cls, config: Any, rotation: IndexRotation) -> IndexShape:
        """Read a transformers config.

        Raises:
            ModelLoadError: for values that no model has.
            UnsupportedModelError: if the config names another rotation than transformers computes.
        """
        head_dim, rope_dim = require_integer(config, "index_head_dim"), require_integer(config, "qk_rope_head_dim")
        if head_dim < rope_dim:
            raise ModelLoadError(
                f"index_head_dim={head_dim} is less than the qk_rope_head_dim={rope_dim} elements that are rotated; "
                "correct config.json"
            )
        if config.q_lora_rank is None:
            raise ModelLoadError(
                "q_lora_rank=None, but an indexer's queries come from a latent of that rank; correct config.json"
            )
        interleaves = getattr(config, "indexer_rope_interleave", None)
        if interleaves is not None and interleaves != (rotation == "neighbours"):
            raise UnsupportedModelError(
                f"config.json has indexer_rope_interleave={shown(interleaves)}, which transformers does not compute "
                "for this architecture; docs/models.md lists what is served"
            )
        return cls(
            num_heads=require_integer(config, "index_n_heads"),
            head_dim=head_dim,
            top_k=require_integer(config, "index_topk"),
            layers=_layers(config),
            rotation=rotation,
        )

    def element_order(self, rope_dim: int) -> list[int] | None:
        """Return the stored index of each element of a key as the decoder has it, which rotates halves; None: the same.

        Products of queries and keys do not depend on the order of their elements.
        """
        if self.rotation == "halves":
            return None
        return [*range(0, rope_dim, 2), *range(1, rope_dim, 2), *range(rope_dim, self.head_dim)]


def _layers(config: Any) -> frozenset[int]:
    """Return the layers with an indexer: all unless the config says which."""
    count, types = config.num_hidden_layers, getattr(config, "indexer_types", None)
    if types is None:
        return frozenset(range(count))
    is_list = isinstance(types, list) and len(types) == count and set(types) <= {"full", "shared"}
    if not is_list or types[0] != "full":
        raise ModelLoadError(
            f"indexer_types={shown(types)} does not say full or shared of each of {count} layers, the first one full; "
            "correct config.json"
        )
    return frozenset(layer for layer, kind in enumerate(types) if kind == "full")
