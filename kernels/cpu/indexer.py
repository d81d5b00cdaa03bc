"""PackedIndexer: a layer's indexer of sparse latent attention, as the C kernels read it (csrc/layer/indexer.h)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from kernels.cpu.bindings import CIndexer
from kernels.cpu.linear import PackedLinear, WeightKind

__all__ = ["IndexerSizes", "PackedIndexer"]


@dataclass(frozen=True, kw_only=True)
class IndexerSizes:
    """The sizes of a layer's indexer, the same on all ranks.

    Attributes:
        hidden_size: numbers of a token in the layer's input.
        query_rank: numbers of the queries' latent.
        num_heads: of its queries; all read one key.
        head_dim: elements of a query or key.
        top_k: tokens that a query attends to at most.
        norm_eps: of the LayerNorm of keys.
    """

    hidden_size: int
    query_rank: int
    num_heads: int
    head_dim: int
    top_k: int
    norm_eps: float


class PackedIndexer:
    """One layer's packed weights, zero until they are set.

    Args:
        sizes: of the indexer.
        kind: the type of the packed weights, but for those of heads, which are float32.

    Attributes:
        query, key, head_weights: its projections.
    """

    def __init__(self, sizes: IndexerSizes, kind: WeightKind) -> None:
        self.query = PackedLinear(kind, sizes.query_rank, sizes.num_heads * sizes.head_dim)
        self.key = PackedLinear(kind, sizes.hidden_size, sizes.head_dim)
        self.head_weights = PackedLinear(WeightKind.FLOAT32, sizes.hidden_size, sizes.num_heads)
        self._kept: dict[str, torch.Tensor] = {}
        self.c_indexer = CIndexer(
            self.query.c_weight,
            self.key.c_weight,
            self.head_weights.c_weight,
            num_heads=sizes.num_heads,
            head_dim=sizes.head_dim,
            top_k=sizes.top_k,
            eps=sizes.norm_eps,
        )
        for name in ("key_norm", "key_bias"):
            self._keep(name, torch.zeros(sizes.head_dim))

    @property
    def address(self) -> int:
        """Where the C structure is, which this object must outlive."""
        return ctypes.addressof(self.c_indexer)

    @property
    def num_bytes(self) -> int:
        """Bytes that the weights take."""
        return self.query.num_bytes + self.key.num_bytes + self.head_weights.num_bytes

    def set_key_norm(self, weight: torch.Tensor) -> None:
        """Set the weights of the norm of keys, [head_dim]."""
        self._keep("key_norm", weight)

    def set_key_bias(self, bias: torch.Tensor) -> None:
        """Set the biases of the norm of keys, [head_dim]."""
        self._keep("key_bias", bias)

    def _keep(self, name: str, numbers: torch.Tensor) -> None:
        self._kept[name] = numbers.float().contiguous()  # the structure has its address only
        setattr(self.c_indexer, name, self._kept[name].data_ptr())
