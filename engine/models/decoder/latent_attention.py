"""LatentAttention: a layer's latent attention over the paged cache, between its first and its last projection."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from engine.models.config.model_config import ModelConfig
from engine.models.config.shapes.latent import LatentShape
from engine.models.decoder.expanded_latents import LatentPart, attend_expanded, parts_of
from engine.models.decoder.forward_context import ForwardContext
from engine.models.decoder.indexer import Indexer
from engine.models.decoder.parallel_layers import RowParallelLinear
from engine.models.decoder.query_growth import growth_factors
from engine.models.tensor_parallel import TensorParallel
from kernels.attention.base import AttentionBackend, AttentionInputs
from kernels.layer_ops.base import LatentCache, LayerOps, Rotation

__all__ = ["LatentAttention"]


class LatentNorm(nn.Module):
    """The weights of the RMSNorm of a latent, which the layers' operations compute."""

    adds_one = False

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps


class HeadMatrices(nn.Module):
    """The matrices of each head that make keys and values of latents, as the checkpoint has them.

    Attributes:
        weight: [num_heads * (nope_dim + value_dim), rank], of each head the rows of its key before those of its value.
    """

    def __init__(self, num_heads: int, shape: LatentShape) -> None:
        super().__init__()
        self.num_heads, self.nope_dim = num_heads, shape.nope_dim
        self.weight = nn.Parameter(torch.empty(num_heads * (shape.nope_dim + shape.value_dim), shape.rank))

    def to_latents(self, queries: torch.Tensor, output: torch.Tensor) -> None:
        """Write to ``output`` what multiplies latents as ``queries`` multiply keys.

        Args:
            queries: [num_tokens, num_heads, nope_dim].
            output: [num_tokens, num_heads, rank], any strides.
        """
        keys = self._by_head[:, : self.nope_dim]
        torch.bmm(queries.transpose(0, 1), keys, out=output.transpose(0, 1))

    def to_values(self, latents: torch.Tensor, output: torch.Tensor) -> None:
        """Write the values of latents to ``output``.

        Args:
            latents: [num_tokens, num_heads, rank].
            output: [num_tokens, num_heads, value_dim], any strides.
        """
        values = self._by_head[:, self.nope_dim :]
        torch.bmm(latents.transpose(0, 1), values.transpose(1, 2), out=output.transpose(0, 1))

    @property
    def _by_head(self) -> torch.Tensor:
        return self.weight.view(self.num_heads, -1, self.weight.shape[1])


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, 2024): see ``LatentShape``, and expanded_latents.py for long prefills.

    Args:
        config: a rank's own share, ``ModelConfig.shard``: its heads, and the latents of all heads.
    """

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel, ops: LayerOps) -> None:
        super().__init__()
        assert config.latent is not None
        self.shape, self.cache, self.ops = config.latent, config.first_cache(layer), ops
        self.scale, self.num_heads = config.attention_scale, config.num_heads
        shape, all_queries = self.shape, config.num_heads * config.head_dim
        self.query_width = all_queries if shape.query_rank is None else shape.query_rank
        self.qkv_a_proj = nn.Linear(
            config.hidden_size, self.query_width + shape.rank + shape.rope_dim, bias=config.output_bias
        )
        has_rank = shape.query_rank is not None
        self.q_a_layernorm = LatentNorm(self.query_width, shape.norm_eps) if has_rank else None
        self.q_b_proj = nn.Linear(self.query_width, all_queries, bias=False) if has_rank else None
        self.indexer = Indexer(config, layer) if shape.has_indexer(layer) else None
        self.kv_a_layernorm = LatentNorm(shape.rank, shape.norm_eps)
        self.kv_b_proj = HeadMatrices(config.num_heads, shape)
        self.o_proj = RowParallelLinear(
            config.num_heads * shape.value_dim, config.hidden_size, bias=config.output_bias, parallel=parallel
        )

    def forward(self, hidden: torch.Tensor, rotation: Rotation | None, context: ForwardContext) -> torch.Tensor:
        """Map ``hidden`` [num_tokens, hidden_size] to the same shape; first stores its latents."""
        (latents,) = context.kv_cache.layers[self.cache]
        metadata = context.metadata
        query, latent = self.qkv_a_proj(hidden).split((self.query_width, latents.shape[2]), dim=1)
        if self.q_b_proj is not None:
            query = self.ops.add_norm(query, None, self.q_a_layernorm)[1]
            if self.indexer is not None:
                context.choice.topk_slots = self.indexer(hidden, query, rotation, context)
            query = self.q_b_proj(query)
        by_head = query.unflatten(1, (self.num_heads, -1))
        if self.shape.query_growth is not None:
            assert rotation is not None
            factors = growth_factors(self.shape.query_growth, rotation.positions)
            by_head = by_head * factors.view(-1, 1, 1).to(by_head.dtype)
        query = hidden.new_empty(len(hidden), self.num_heads, latents.shape[2])
        parts = self._parts(context, latents)
        for part in parts:
            self._start_queries(part, by_head[part.tokens, :, : self.shape.nope_dim], query[part.tokens])
        # All latents of the step are written before any is read: sequences of one step may share a block it fills.
        cache = LatentCache(latents, metadata.slot_mapping)
        self.ops.rotate_and_store_latents(
            query, by_head[..., self.shape.nope_dim :], latent, self.kv_a_layernorm, rotation, cache
        )
        keys = latents.unsqueeze(2)  # one KV head
        topk_slots = None if self.shape.index is None else context.choice.topk_slots
        inputs = AttentionInputs(query, keys, keys[..., : self.shape.rank], metadata, self.scale, topk_slots=topk_slots)
        attended = hidden.new_empty(len(hidden), self.num_heads, self.shape.value_dim)
        for part in parts:
            self._attend(part, inputs, context.backend, attended)
        output: torch.Tensor = self.o_proj(attended.flatten(1))
        return output

    def _parts(self, context: ForwardContext, latents: torch.Tensor) -> list[LatentPart]:
        if context.backend.expands_latents:
            return parts_of(context.metadata, self.shape, self.num_heads, latents)
        return [LatentPart(slice(None), context.metadata)]

    def _start_queries(self, part: LatentPart, by_head: torch.Tensor, query: torch.Tensor) -> None:
        """Write what precedes the rotated elements of a part's queries."""
        rank, nope_dim = self.shape.rank, self.shape.nope_dim
        if part.block_ids is None:
            self.kv_b_proj.to_latents(by_head, query[..., :rank])
        else:
            query[..., rank - nope_dim : rank] = by_head

    def _attend(
        self, part: LatentPart, layer: AttentionInputs, backend: AttentionBackend, attended: torch.Tensor
    ) -> None:
        if part.block_ids is not None:
            attend_expanded(part, layer, self.kv_b_proj.weight, self.shape, backend, attended)
            return
        slots = None if layer.topk_slots is None else layer.topk_slots[part.tokens]
        inputs = replace(layer, query=layer.query[part.tokens], metadata=part.metadata, topk_slots=slots)
        self.kv_b_proj.to_values(backend.forward(inputs), attended[part.tokens])
