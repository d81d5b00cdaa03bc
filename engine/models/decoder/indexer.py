"""Indexer: chooses the tokens that a layer's sparse latent attention reads, and keeps their index keys."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from engine.models.config.model_config import ModelConfig
from engine.models.decoder.forward_context import ForwardContext
from kernels.attention.indexer import topk_slots
from kernels.attention.indexer_inputs import IndexerInputs
from kernels.cache.store_kvcache import store_kvcache
from kernels.layer_ops.base import Rotation
from kernels.layer_ops.torch import rotate_heads

__all__ = ["Indexer"]


class HeadWeights(nn.Module):
    """A projection to the weights of an indexer's heads, in float32 whatever the model's dtype is."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, hidden_size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``hidden`` [num_tokens, hidden_size] to float32 [num_tokens, num_heads]."""
        return F.linear(hidden.float(), self.weight)


class Indexer(nn.Module):
    """The indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, 2025): see ``IndexShape``.

    Every tensor-parallel rank has the whole indexer, so all choose the same tokens.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.latent is not None
        assert config.latent.query_rank is not None
        assert config.latent.index is not None
        shape = self.shape = config.latent.index
        self.rope_dim, self.cache = config.latent.rope_dim, config.first_cache(layer) + 1
        self.wq_b = nn.Linear(config.latent.query_rank, shape.num_heads * shape.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, shape.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(shape.head_dim, eps=shape.norm_eps)
        self.weights_proj = HeadWeights(config.hidden_size, shape.num_heads)

    def forward(
        self, hidden: torch.Tensor, query_latent: torch.Tensor, rotation: Rotation, context: ForwardContext
    ) -> torch.Tensor:
        """Store the step's index keys and return the slots that each token attends to, as ``topk_slots`` does.

        Args:
            hidden: [num_tokens, hidden_size], the input of attention.
            query_latent: [num_tokens, query_rank], normalized.
            rotation: of latent attention.
            context: of the step.
        """
        (key_cache,) = context.kv_cache.layers[self.cache]
        query = self._rotate(self.wq_b(query_latent).unflatten(1, (self.shape.num_heads, -1)), rotation)
        keys = self._rotate(self.k_norm(self.wk(hidden)).unsqueeze(1), rotation)
        # All keys of the step are written before any is read: sequences of one step may share a block it fills.
        store_kvcache(keys, None, key_cache.unsqueeze(2), None, context.metadata.slot_mapping)
        weights = self.weights_proj(hidden) * self.shape.num_heads**-0.5
        scale = self.shape.head_dim**-0.5
        return topk_slots(IndexerInputs(query, weights, key_cache, context.metadata, scale, self.shape.top_k))

    def _rotate(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Rotate the first elements of heads [num_tokens, num_heads, head_dim]."""
        return torch.cat((rotate_heads(heads[..., : self.rope_dim], rotation), heads[..., self.rope_dim :]), dim=-1)
