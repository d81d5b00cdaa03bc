"""PackedLatent: what a layer with latent attention has beside its two projections, as the C kernels read it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from kernels.cpu.bindings import CLatent, CWeight
from kernels.cpu.coded_linear import NOT_CODED, Coded, packed_linear
from kernels.cpu.indexer import IndexerSizes, PackedIndexer
from kernels.cpu.linear import LANES, PANELS_AT_ONCE, PackedLinear, WeightKind

__all__ = ["LatentSizes", "PackedLatent"]

_OUTPUTS_AT_ONCE = LANES * PANELS_AT_ONCE


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """The sizes of a layer's latent attention, or of a tensor-parallel rank's heads.

    Attributes:
        query_rank: numbers that queries are computed from; None: the layer's first projection gives queries.
        rank: numbers of a token's latent.
        nope_dim, rope_dim: elements of a head's queries without positions, and of those that are rotated.
        value_dim: elements of a head's values.
        norm_eps: of the norms of both latents.
        index: of the layer's indexer; None: it has none.
    """

    num_heads: int
    query_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float
    index: IndexerSizes | None = None

    @property
    def query_width(self) -> int:
        """Outputs of the first projection that queries, or what they are computed from, take."""
        return self.num_heads * (self.nope_dim + self.rope_dim) if self.query_rank is None else self.query_rank

    @property
    def cached_dim(self) -> int:
        """Numbers that the cache keeps of a token."""
        return self.rank + self.rope_dim


class PackedLatent:
    """One layer's packed weights between its projections, zero until they are set.

    The matrices of the heads are never int8: their products are queries and values, which must be more exact.

    Args:
        sizes: of the layer.
        kind: the type of the other packed weights.
        coded: the formats of weights that stay codes, by the names of the attributes; the others are of this kind.

    Attributes:
        query: the projection from the queries' latent; None: there is none.
        indexer: chooses the tokens that queries attend to; None: the layer has none.
    """

    def __init__(self, sizes: LatentSizes, kind: WeightKind, coded: Coded = NOT_CODED) -> None:
        self.sizes = sizes
        heads, inner = sizes.num_heads, WeightKind.BFLOAT16 if kind.has_output_sums else kind
        self.query: PackedLinear | None = None
        if sizes.query_rank is not None:
            self.query = packed_linear(
                kind, sizes.query_rank, heads * (sizes.nope_dim + sizes.rope_dim), sections=coded.get("query")
            )
        self._to_latents = PackedLinear(inner, sizes.nope_dim, heads * _padded(sizes.rank))
        self._to_values = PackedLinear(inner, sizes.rank, heads * _padded(sizes.value_dim))
        self.indexer = None if sizes.index is None else PackedIndexer(sizes.index, inner)
        self._kept: dict[str, torch.Tensor] = {}
        self.c_latent = CLatent(
            CWeight() if self.query is None else self.query.c_weight,
            self._to_latents.c_weight,
            self._to_values.c_weight,
            indexer=None if self.indexer is None else self.indexer.address,
            query_width=sizes.query_width,
            rank=sizes.rank,
            nope_dim=sizes.nope_dim,
            rope_dim=sizes.rope_dim,
            value_dim=sizes.value_dim,
            eps=sizes.norm_eps,
        )

    @property
    def address(self) -> int:
        """Where the C structure is, which this object must outlive."""
        return ctypes.addressof(self.c_latent)

    @property
    def num_bytes(self) -> int:
        """Bytes that the weights take."""
        of_query = sum(0 if part is None else part.num_bytes for part in (self.query, self.indexer))
        return of_query + self._to_latents.num_bytes + self._to_values.num_bytes

    def set_query_norm(self, weight: torch.Tensor) -> None:
        """Set the weights of the norm of the queries' latent, [query_rank]."""
        self._keep("query_norm", weight)

    def set_latent_norm(self, weight: torch.Tensor) -> None:
        """Set the weights of the norm of latents, [rank]."""
        self._keep("latent_norm", weight)

    def set_growth(self, factors: torch.Tensor) -> None:
        """Set the factors of queries at every position, [length]; without them there are none."""
        self._keep("growth", factors)

    def set_head_matrices(self, weight: torch.Tensor) -> None:
        """Set each head's matrices, [num_heads * (nope_dim + value_dim), rank], that of keys before that of values."""
        sizes = self.sizes
        for head, matrices in enumerate(weight.view(sizes.num_heads, -1, sizes.rank)):
            keys, values = matrices.split((sizes.nope_dim, sizes.value_dim))
            self._to_latents.set_weight(keys.t(), first_output=head * _padded(sizes.rank))
            self._to_values.set_weight(values, first_output=head * _padded(sizes.value_dim))

    def _keep(self, name: str, numbers: torch.Tensor) -> None:
        self._kept[name] = numbers.float().contiguous()  # the structure has its address only
        setattr(self.c_latent, name, self._kept[name].data_ptr())


def _padded(outputs: int) -> int:
    """Return the outputs that a head takes among those of all: the kernels read panels in fours."""
    return -(-outputs // _OUTPUTS_AT_ONCE) * _OUTPUTS_AT_ONCE
