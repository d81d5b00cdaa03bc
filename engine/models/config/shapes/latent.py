"""LatentShape: the sizes of latent attention, read from a config."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.kv.layer_cache import Latent, LayerCache
from engine.models.config.families.table import Family
from engine.models.config.shapes.index import IndexShape
from engine.models.config.shapes.query_growth import QueryGrowth
from engine.models.config.values.limits import require_integer, require_number

__all__ = ["LatentShape"]

_NORM_EPS = 1e-6  # of every family, whatever rms_norm_eps is


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-V2, 2024).

    Of a token the cache keeps a latent and one rotated key for all heads. The keys and values of a head are products of
    the latent with two matrices. Only long prefills on GPUs compute them. Elsewhere the first matrix multiplies
    queries, the second the weighted sum of latents: attention has a single KV head, whose values are the beginnings of
    its keys.

    Attributes:
        query_rank: numbers that queries are computed from; None: they are a projection of the layer's input.
        rank: numbers of the latent.
        nope_dim, rope_dim: elements of a head's queries and keys without positions, and of those that are rotated.
        value_dim: elements of a head's values.
        norm_eps: of the norms of both latents.
        query_growth: None: queries have no factor.
        index: chooses the tokens that a query attends to; None: it attends to all.
    """

    query_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float = _NORM_EPS
    query_growth: QueryGrowth | None = None
    index: IndexShape | None = None

    @property
    def head_dim(self) -> int:
        """Elements of a head's queries."""
        return self.nope_dim + self.rope_dim

    @property
    def cache(self) -> Latent:
        """What a layer caches of a token's keys and values."""
        return Latent(self.rank, self.rope_dim)

    def has_indexer(self, layer: int) -> bool:
        """Return whether a layer chooses tokens itself."""
        return self.index is not None and layer in self.index.layers

    def caches_of(self, layer: int) -> list[LayerCache]:
        """Return what a layer caches: latents, and index keys if it has an indexer."""
        own: list[LayerCache] = [self.cache]
        return own if self.index is None or layer not in self.index.layers else [*own, self.index.cache]

    @classmethod
    def from_hf(cls, config: Any, family: Family) -> LatentShape:
        """Read a transformers config.

        Args:
            config: of transformers.
            family: the model's.

        Raises:
            ModelLoadError: if a size is not a positive integer, for an odd qk_rope_head_dim, or for an indexer that no
                model has.
            UnsupportedModelError: if some of the projections from the layer's input have biases.
        """
        query_rank = None if config.q_lora_rank is None else require_integer(config, "q_lora_rank")
        if query_rank is None and getattr(config, "attention_bias", False):
            raise UnsupportedModelError(
                "attention_bias=true with q_lora_rank=null is not supported: no model is published with both"
            )
        rope_dim = require_integer(config, "qk_rope_head_dim")
        if rope_dim % 2:
            raise ModelLoadError(f"qk_rope_head_dim={rope_dim} must be even; correct config.json")
        return cls(
            query_rank=query_rank,
            rank=require_integer(config, "kv_lora_rank"),
            nope_dim=require_integer(config, "qk_nope_head_dim"),
            rope_dim=rope_dim,
            value_dim=require_integer(config, "v_head_dim"),
            query_growth=QueryGrowth.of_rope(config) if family.grows_queries else None,
            index=None if family.index_rotation is None else IndexShape.from_hf(config, family.index_rotation),
        )

    def attention_scale(self, config: Any) -> float:
        """Return the factor of queries' products with keys; YaRN's for long contexts enters it squared.

        Raises:
            ModelLoadError: if a number that YaRN's is computed of is not one.
        """
        parameters, scale = getattr(config, "rope_parameters", None) or {}, float(self.head_dim**-0.5)
        if parameters.get("rope_type", "default") == "default" or not parameters.get("mscale_all_dim"):
            return scale
        values = SimpleNamespace(**parameters)
        amount, factor = require_number(values, "mscale_all_dim"), require_number(values, "factor")
        growth = 0.1 * amount * math.log(factor) + 1.0 if factor > 1 else 1.0
        return scale * growth * growth
