"""ForwardContext: what the layers of one step share beside their input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from engine.kv.kv_cache import CachedLayers, KVCache
from kernels.attention.base import AttentionBackend
from kernels.attention.window import Window
from kernels.attention_metadata import AttentionMetadata
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["AuxStates", "ForwardContext", "SparseChoice"]


@dataclass(frozen=True)
class AuxStates:
    """Auxiliary hidden states, which an EAGLE-3 head reads: the model writes its residual stream before some layers.

    Attributes:
        layers: int32, indices of the layers, ascending; the number of layers stands for the end of the last one.
        states: float32 [num_tokens, len(layers) * hidden_size], those of one token side by side.
    """

    layers: torch.Tensor
    states: torch.Tensor


@dataclass
class SparseChoice:
    """The tokens that sparse attention reads; layers with an indexer write it, the layers after them read it.

    Attributes:
        topk_slots: of the last such layer, as ``AttentionInputs`` has them.
    """

    topk_slots: torch.Tensor | None = None


@dataclass(frozen=True)
class ForwardContext:
    """What the layers of one step share, passed to them explicitly: the model itself knows no sequences.

    Attributes:
        kv_cache: whose ``layers`` are the caches that the model declares, in that order.
        windows: as ``metadata``, of the pages of each window that has pages of its own.
        recurrent: the step's batch for layers with states; None if the model has none.
        choice: of layers with sparse attention.
        aux_states: which the model is to write; None: there is no EAGLE-3 head.
        query_factors: float32 [num_tokens, 1, 1], of queries in layers without RoPE; None: they have none.
    """

    backend: AttentionBackend
    metadata: AttentionMetadata
    kv_cache: KVCache | CachedLayers
    windows: Mapping[Window, AttentionMetadata] = field(default_factory=dict)
    recurrent: RecurrentMetadata | None = None
    choice: SparseChoice = field(default_factory=SparseChoice)
    aux_states: AuxStates | None = None
    query_factors: torch.Tensor | None = None

    def metadata_for(self, window: Window | None) -> AttentionMetadata:
        """Return the step's metadata for layers with this window, whose pages may be those of all layers."""
        return self.metadata if window is None else self.windows.get(window, self.metadata)
