"""Attention: a layer's attention over the paged cache, between its two projections."""

from __future__ import annotations

import torch
from torch import nn

from engine.models.checkpoint.kv_scales import KVScales
from engine.models.config.model_config import ModelConfig
from engine.models.decoder.forward_context import ForwardContext
from engine.models.decoder.norms import norm_if
from engine.models.decoder.parallel_layers import RowParallelLinear
from engine.models.tensor_parallel import TensorParallel
from kernels.attention.base import AttentionInputs
from kernels.layer_ops.base import LayerCache, LayerOps, Rotation

__all__ = ["Attention"]


class Attention(nn.Module):
    """Grouped-query attention over the paged cache.

    Biases, QK norm, RoPE, factors of queries, soft-cap, window and a gate of the output are optional. A layer may read
    the keys and values of an earlier one, and has no projections and norms for them then.

    Args:
        config: a rank's own share, ``ModelConfig.shard``.

    Attributes:
        kv_scales: of keys and values in a cache of FP8.
    """

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel, ops: LayerOps) -> None:
        super().__init__()
        self.cache, self.ops = config.first_cache(layer), ops
        self.window = config.windows[layer]
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        kv_heads = config.kv_heads(layer)
        self.stores = layer not in config.layer_heads.shared
        self.kv_scales = KVScales()
        self.value_eps = config.rms_norm_eps if config.normalizes_values and self.stores else None
        query_width, key_width = config.num_heads * kv_heads.dim, kv_heads.count * kv_heads.dim if self.stores else 0
        self.gate_width = query_width if config.gates_attention else 0
        qkv_width = self.gate_width + query_width + 2 * key_width
        self.qkv_proj = nn.Linear(config.hidden_size, qkv_width, bias=config.qkv_bias)
        self.o_proj = RowParallelLinear(query_width, config.hidden_size, bias=config.output_bias, parallel=parallel)
        widths = (query_width, key_width) if config.qk_norm == "projection" else (kv_heads.dim, kv_heads.dim)
        exists = config.has_qk_norm(layer)
        self.grows_queries = config.grows_queries(layer)
        self.q_norm, self.k_norm = (
            norm_if(exists, config, widths[0]),
            norm_if(exists and self.stores, config, widths[1]),
        )

    def forward(self, hidden: torch.Tensor, rotation: Rotation | None, context: ForwardContext) -> torch.Tensor:
        """Map ``hidden`` [num_tokens, hidden_size] to the same shape; first stores its keys and values."""
        key_cache, value_cache = context.kv_cache.layers[self.cache]
        metadata = context.metadata_for(self.window)
        slots, scales = metadata.slot_mapping if self.stores else None, self.kv_scales
        cache = LayerCache(key_cache, value_cache, slots, scales.key, scales.value)
        # All keys of the step are written before any is read: sequences of one step may share a block it fills.
        gate_and_qkv = self.qkv_proj(hidden)
        qkv = gate_and_qkv[:, self.gate_width :]
        query = self.ops.rotate_and_store(qkv, self.q_norm, self.k_norm, rotation, cache, self.value_eps)
        if self.grows_queries:
            assert context.query_factors is not None
            query = (query * context.query_factors).to(query.dtype)
        inputs = AttentionInputs(
            query,
            key_cache,
            value_cache,
            metadata,
            self.scale,
            self.window,
            self.softcap,
            key_scale=scales.key,
            value_scale=scales.value,
        )
        attended = context.backend.forward(inputs).flatten(1)
        if self.gate_width:
            attended = attended * torch.sigmoid(gate_and_qkv[:, : self.gate_width])
        output: torch.Tensor = self.o_proj(attended)
        return output
