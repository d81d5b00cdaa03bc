"""Attention: a layer's attention over the paged cache, between its two projections."""

from __future__ import annotations

import torch
from torch import nn

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

    Biases, QK norm, RoPE, soft-cap, sliding window and a gate of the output are optional.

    Args:
        config: a rank's own share, ``ModelConfig.shard``.
    """

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel, ops: LayerOps) -> None:
        super().__init__()
        self.cache, self.ops = config.first_cache(layer), ops
        self.sliding_window = config.sliding_windows[layer]
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.gate_width = config.num_heads * config.head_dim if config.gates_attention else 0
        qkv_width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, self.gate_width + qkv_width, bias=config.qkv_bias)
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias, parallel=parallel
        )
        heads = (1, 1) if config.qk_norm == "head" else (config.num_heads, config.num_kv_heads)  # normalized together
        exists = config.qk_norm != "none"
        self.q_norm, self.k_norm = (norm_if(exists, config, n * config.head_dim) for n in heads)

    def forward(self, hidden: torch.Tensor, rotation: Rotation | None, context: ForwardContext) -> torch.Tensor:
        """Map ``hidden`` [num_tokens, hidden_size] to the same shape; first stores its keys and values."""
        key_cache, value_cache = context.kv_cache.layers[self.cache]
        metadata = context.metadata_for(self.sliding_window)
        cache = LayerCache(key_cache, value_cache, metadata.slot_mapping)
        # All keys of the step are written before any is read: sequences of one step may share a block it fills.
        gate_and_qkv = self.qkv_proj(hidden)
        qkv = gate_and_qkv[:, self.gate_width :]
        query = self.ops.rotate_and_store(qkv, self.q_norm, self.k_norm, rotation, cache)
        inputs = AttentionInputs(query, key_cache, value_cache, metadata, self.scale, self.sliding_window, self.softcap)
        attended = context.backend.forward(inputs).flatten(1)
        if self.gate_width:
            attended = attended * torch.sigmoid(gate_and_qkv[:, : self.gate_width])
        output: torch.Tensor = self.o_proj(attended)
        return output
