"""The decoder: one config-driven transformer for the checkpoints of all families in families.py.

Tokens are packed: the tokens of all sequences of a step are one tensor, ``[num_tokens, hidden_size]``. Only attention
distinguishes sequences, through the step's ForwardContext. Linear layers that read the same input are fused.
Tensor-parallel ranks compute the same tokens, each with its own heads, features and part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from engine.kv.kv_cache import KVCache
from engine.models.config import ModelConfig
from engine.models.experts.layer import SparseMoeBlock
from engine.models.rope import apply_rope
from engine.models.sharding import vocab_range
from engine.models.tensor_parallel import TensorParallel
from kernels.attention.base import AttentionBackend, AttentionInputs
from kernels.attention_metadata import AttentionMetadata
from kernels.cpu.layer import Activation
from kernels.store_kvcache import store_kvcache

__all__ = ["Decoder", "ForwardContext", "RowParallelLinear", "VocabParallelEmbedding"]


@dataclass(frozen=True)
class ForwardContext:
    """What the attention layers of one step share, passed to them explicitly: the model itself knows no sequences."""

    backend: AttentionBackend
    metadata: AttentionMetadata
    kv_cache: KVCache


class RowParallelLinear(nn.Linear):
    """A linear layer that reads its rank's input features and sums the ranks' outputs; the bias is added once."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, parallel: TensorParallel) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.parallel = parallel

    def forward(self, own_features: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, in_features] to the whole [num_tokens, out_features]."""
        own_output = F.linear(own_features, self.weight, self.bias if self.parallel.rank == 0 else None)
        return self.parallel.all_reduce(own_output)


class VocabParallelEmbedding(nn.Embedding):
    """An embedding that holds its rank's part of the vocabulary: other ids give zero, and the ranks are summed."""

    def __init__(self, vocab_size: int, hidden_size: int, parallel: TensorParallel) -> None:
        self.first_id, num_ids = vocab_range(vocab_size, parallel.rank, parallel.size)
        super().__init__(num_ids, hidden_size)
        self.parallel = parallel

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens] to [num_tokens, hidden_size]."""
        if self.parallel.size == 1:
            return F.embedding(token_ids, self.weight)
        own_ids = token_ids - self.first_id
        foreign = (own_ids < 0) | (own_ids >= self.num_embeddings)
        own = F.embedding(own_ids.masked_fill(foreign, 0), self.weight).masked_fill(foreign.unsqueeze(1), 0)
        return self.parallel.all_reduce(own)


class AddOneRMSNorm(nn.RMSNorm):
    """An RMSNorm that multiplies by 1 + its weight, in float32 (Gemma)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., width] to the same shape and dtype."""
        normed = F.rms_norm(x.float(), self.normalized_shape, eps=self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


def _norm(config: ModelConfig, width: int, *, exists: bool = True) -> nn.Module:
    if not exists:
        return nn.Identity()
    return (AddOneRMSNorm if config.norms_add_one else nn.RMSNorm)(width, config.rms_norm_eps)


Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of the step's tokens, [num_tokens, 1, head_dim // 2]


class Attention(nn.Module):
    """Grouped-query attention over the paged cache, with optional biases, QK norm, RoPE, soft-cap and sliding window.

    ``config`` here and below is a rank's own share, ``ModelConfig.shard``.
    """

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.sliding_window = config.sliding_windows[layer]
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.norms_each_head = config.qk_norm == "head"
        self.sizes = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        qkv_heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv_proj = nn.Linear(config.hidden_size, qkv_heads * config.head_dim, bias=config.qkv_bias)
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias, parallel=parallel
        )
        widths = (config.head_dim, config.head_dim) if self.norms_each_head else self.sizes[:2]
        self.q_norm, self.k_norm = (_norm(config, width, exists=config.qk_norm != "none") for width in widths)

    def forward(self, hidden: torch.Tensor, rotation: Rotation | None, context: ForwardContext) -> torch.Tensor:
        """Map ``hidden`` [num_tokens, hidden_size] to the same shape; first stores its keys and values."""
        query, key, value = self.qkv_proj(hidden).split(self.sizes, dim=1)
        if not self.norms_each_head:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (projected.unflatten(1, (-1, self.head_dim)) for projected in (query, key, value))
        if self.norms_each_head:
            query, key = self.q_norm(query), self.k_norm(key)
        if rotation is not None:
            query, key = apply_rope(query, *rotation), apply_rope(key, *rotation)
        key_cache, value_cache = context.kv_cache.layers[self.layer]
        # All keys of the step are written before any is read: sequences of one step may share a block it fills.
        store_kvcache(key, value, key_cache, value_cache, context.metadata.slot_mapping)
        inputs = AttentionInputs(
            query, key_cache, value_cache, context.metadata, self.scale, self.sliding_window, self.softcap
        )
        attended = context.backend.forward(inputs)
        output: torch.Tensor = self.o_proj(attended.flatten(1))
        return output


_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class MLP(nn.Module):
    """Gated feed-forward: SwiGLU, or GeGLU with the approximation by tanh."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[config.activation]
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, bias=config.mlp_bias, parallel=parallel
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        output: torch.Tensor = self.down_proj(self.activation(gate) * up)
        return output


def _feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
    """Return a layer's feed-forward: dense, or experts."""
    experts = config.experts
    if experts is None or not config.has_experts(layer):
        return MLP(config, parallel)
    inner = experts.shared_intermediate_size
    shared = MLP(replace(config, intermediate_size=inner), parallel) if inner else None
    return SparseMoeBlock(experts, config.hidden_size, parallel, shared)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each with norms before, after or around it and added to its input."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__()
        width, has_input_norms, has_output_norms = config.hidden_size, config.norms != "after", config.norms != "before"
        self.rope_table = config.rope.tables[layer]
        self.residual_multiplier = config.residual_multiplier
        self.input_layernorm = _norm(config, width, exists=has_input_norms)
        self.self_attn = Attention(config, layer, parallel)
        self.attention_output_norm = _norm(config, width, exists=has_output_norms)
        self.post_attention_layernorm = _norm(config, width, exists=has_input_norms)  # before the feed-forward
        self.mlp = _feed_forward(config, layer, parallel)
        self.mlp_output_norm = _norm(config, width, exists=has_output_norms)

    def forward(self, hidden: torch.Tensor, rotations: Sequence[Rotation], context: ForwardContext) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        rotation = None if self.rope_table is None else rotations[self.rope_table]
        attended = self.self_attn(self.input_layernorm(hidden), rotation, context)
        hidden = torch.add(hidden, self.attention_output_norm(attended), alpha=self.residual_multiplier)
        computed = self.mlp(self.post_attention_layernorm(hidden))
        return torch.add(hidden, self.mlp_output_norm(computed), alpha=self.residual_multiplier)


def _rotation(table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
    cos, sin = table[positions].to(dtype).unsqueeze(2).unbind(1)
    return cos, sin


class Decoder(nn.Module):
    """A decoder-only language model.

    Args:
        config: the whole model's shape.
        rope: cosines and sines of every position it may see, float32 [num_tables, length, 2, head_dim // 2].
        parallel: this rank and its group.

    Attributes:
        attention: the shape of this rank's attention layers.
    """

    def __init__(self, config: ModelConfig, rope: torch.Tensor, parallel: TensorParallel) -> None:
        super().__init__()
        self.config = config
        self.parallel = parallel
        own = config.shard(parallel.size)
        self.attention = own.attention
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parallel)
        self.layers = nn.ModuleList(DecoderLayer(own, layer, parallel) for layer in range(config.num_layers))
        self.norm = _norm(config, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, self.embed_tokens.num_embeddings, bias=False)
        self.rope: torch.Tensor
        self.register_buffer("rope", rope, persistent=False)

    @property
    def num_bytes(self) -> int:
        """Bytes that the weights take."""
        return sum({weight.data_ptr(): weight.nbytes for weight in self.parameters()}.values())  # tied ones are one

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return the last hidden states [num_tokens, hidden_size] of ``token_ids`` at ``positions`` [num_tokens]."""
        hidden: torch.Tensor = self.embed_tokens(token_ids)
        multiplier = self.config.embedding_multiplier_in(hidden.dtype)
        if multiplier != 1.0:
            hidden = hidden * multiplier
        rotations = [_rotation(table, positions, hidden.dtype) for table in self.rope]
        for layer in self.layers:
            hidden = layer(hidden, rotations, context)
        output: torch.Tensor = self.norm(hidden)
        return output

    def compute_logits(self, hidden: torch.Tensor, token_indices: torch.Tensor) -> torch.Tensor | None:
        """Return float32 logits [len(token_indices), vocab_size] on rank 0, None elsewhere.

        Args:
            hidden: [num_tokens, hidden_size].
            token_indices: int64, the tokens of ``hidden`` whose logits are wanted.
        """
        logits = self.parallel.gather_columns(self.lm_head(hidden.index_select(0, token_indices)))
        if logits is None:
            return None
        logits, softcap = logits[:, : self.config.vocab_size].float(), self.config.logits_softcap
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)
