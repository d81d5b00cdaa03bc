"""The decoder: one config-driven transformer for the checkpoints of all families in families.py.

Tokens are packed: the tokens of all sequences of a step are one tensor, ``[num_tokens, hidden_size]``. Only attention
distinguishes sequences, through the step's ForwardContext. Linear layers that read the same input are fused.
Tensor-parallel ranks compute the same tokens, each with its own heads, features and part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F

from engine.kv.kv_cache import KVCache
from engine.models.checkpoint.sharding import vocab_range
from engine.models.config.model_config import ModelConfig
from engine.models.decoder.experts import SparseMoeBlock
from engine.models.tensor_parallel import TensorParallel
from kernels.attention.base import AttentionBackend, AttentionInputs
from kernels.attention_metadata import AttentionMetadata
from kernels.layer_ops.base import Addend, LayerCache, LayerOps, Rotation
from kernels.recurrent.metadata import RecurrentMetadata

__all__ = ["Decoder", "ForwardContext", "RowParallelLinear", "VocabParallelEmbedding"]


@dataclass(frozen=True)
class ForwardContext:
    """What the layers of one step share, passed to them explicitly: the model itself knows no sequences.

    Attributes:
        kv_cache: whose ``layers`` are the caches that the model declares, in that order.
        recurrent: the step's batch for layers with states; None if the model has none.
    """

    backend: AttentionBackend
    metadata: AttentionMetadata
    kv_cache: KVCache
    recurrent: RecurrentMetadata | None = None


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


class RMSNorm(nn.Module):
    """The weights of an RMSNorm, which the layers' operations compute: see ``kernels.layer_ops.base.Norm``."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps, self.adds_one = config.rms_norm_eps, config.norms_add_one


def _norm(config: ModelConfig, width: int, *, exists: bool = True) -> RMSNorm | None:
    return RMSNorm(config, width) if exists else None


class Attention(nn.Module):
    """Grouped-query attention over the paged cache, with optional biases, QK norm, RoPE, soft-cap and sliding window.

    ``config`` here and below is a rank's own share, ``ModelConfig.shard``.
    """

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel, ops: LayerOps) -> None:
        super().__init__()
        self.layer, self.ops = layer, ops
        self.sliding_window = config.sliding_windows[layer]
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        qkv_heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv_proj = nn.Linear(config.hidden_size, qkv_heads * config.head_dim, bias=config.qkv_bias)
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias, parallel=parallel
        )
        heads = (1, 1) if config.qk_norm == "head" else (config.num_heads, config.num_kv_heads)  # normalized together
        exists = config.qk_norm != "none"
        self.q_norm, self.k_norm = (_norm(config, n * config.head_dim, exists=exists) for n in heads)

    def forward(self, hidden: torch.Tensor, rotation: Rotation | None, context: ForwardContext) -> torch.Tensor:
        """Map ``hidden`` [num_tokens, hidden_size] to the same shape; first stores its keys and values."""
        key_cache, value_cache = context.kv_cache.layers[self.layer]
        cache = LayerCache(key_cache, value_cache, context.metadata.slot_mapping)
        # All keys of the step are written before any is read: sequences of one step may share a block it fills.
        query = self.ops.rotate_and_store(self.qkv_proj(hidden), self.q_norm, self.k_norm, rotation, cache)
        inputs = AttentionInputs(
            query, key_cache, value_cache, context.metadata, self.scale, self.sliding_window, self.softcap
        )
        attended = context.backend.forward(inputs)
        output: torch.Tensor = self.o_proj(attended.flatten(1))
        return output


class MLP(nn.Module):
    """Gated feed-forward: SwiGLU, or GeGLU with the approximation by tanh."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, ops: LayerOps) -> None:
        super().__init__()
        self.ops, self.activation = ops, config.activation
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, bias=config.mlp_bias, parallel=parallel
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        output: torch.Tensor = self.down_proj(self.ops.gated_activation(self.gate_up_proj(hidden), self.activation))
        return output


def _feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel, ops: LayerOps) -> nn.Module:
    """Return a layer's feed-forward: dense, or experts."""
    experts = config.experts
    if experts is None or not config.has_experts(layer):
        return MLP(config, parallel, ops)
    inner = experts.shared_intermediate_size
    alone = TensorParallel()  # the block sums over the ranks, once
    shared = MLP(replace(config, intermediate_size=inner, mlp_bias=False), alone, ops) if inner else None
    return SparseMoeBlock(experts, config.hidden_size, parallel, shared)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each with norms before, after or around it and added to its input.

    The next layer, or the last norm, adds what the feed-forward returns: the sum and the norm after it are one kernel.
    """

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel, ops: LayerOps) -> None:
        super().__init__()
        self.ops = ops
        width, has_input_norms, has_output_norms = config.hidden_size, config.norms != "after", config.norms != "before"
        self.rope_table = config.rope.tables[layer]
        self.residual_multiplier = config.residual_multiplier
        self.input_layernorm = _norm(config, width, exists=has_input_norms)
        self.self_attn = Attention(config, layer, parallel, ops)
        self.attention_output_norm = _norm(config, width, exists=has_output_norms)
        self.post_attention_layernorm = _norm(config, width, exists=has_input_norms)  # before the feed-forward
        self.mlp = _feed_forward(config, layer, parallel, ops)
        self.mlp_output_norm = _norm(config, width, exists=has_output_norms)

    def forward(
        self, residual: torch.Tensor, addend: Addend | None, rotations: Sequence[Rotation], context: ForwardContext
    ) -> tuple[torch.Tensor, Addend]:
        """Compute the layer.

        Args:
            residual: [num_tokens, hidden_size].
            addend: what the layer before adds to it.

        Returns:
            The residual stream after the attention, and what the feed-forward adds to it.
        """
        rotation = None if self.rope_table is None else rotations[self.rope_table]
        residual, hidden = self.ops.add_norm(residual, addend, self.input_layernorm)
        attended = Addend(
            self.self_attn(hidden, rotation, context), self.attention_output_norm, self.residual_multiplier
        )
        residual, hidden = self.ops.add_norm(residual, attended, self.post_attention_layernorm)
        return residual, Addend(self.mlp(hidden), self.mlp_output_norm, self.residual_multiplier)


class Decoder(nn.Module):
    """A decoder-only language model.

    Args:
        config: the whole model's shape.
        rope: cosines and sines of every position it may see, float32 [num_tables, length, 2, head_dim // 2].
        parallel: this rank and its group.
        ops: the layers' operations, on the device of the weights.

    Attributes:
        attention: the shape of this rank's attention layers.
        layer_caches: what each layer caches on this rank.
    """

    def __init__(self, config: ModelConfig, rope: torch.Tensor, parallel: TensorParallel, ops: LayerOps) -> None:
        super().__init__()
        self.config = config
        self.parallel, self.ops = parallel, ops
        own = config.shard(parallel.size)
        self.attention, self.layer_caches = own.attention, own.layer_caches
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parallel)
        self.layers = nn.ModuleList(DecoderLayer(own, layer, parallel, ops) for layer in range(config.num_layers))
        self.norm = RMSNorm(config, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, self.embed_tokens.num_embeddings, bias=False)
        self.rope: torch.Tensor
        self.register_buffer("rope", rope, persistent=False)

    @property
    def num_bytes(self) -> int:
        """Bytes that the weights take."""
        return sum({weight.data_ptr(): weight.nbytes for weight in self.parameters()}.values())  # tied ones count once

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return the last hidden states [num_tokens, hidden_size] of ``token_ids`` at ``positions`` [num_tokens]."""
        hidden: torch.Tensor = self.embed_tokens(token_ids)
        multiplier = self.config.embedding_multiplier_in(hidden.dtype)
        if multiplier != 1.0:
            hidden = hidden * multiplier
        rotations = [Rotation(table, positions, hidden.dtype) for table in self.rope]
        addend: Addend | None = None
        for layer in self.layers:
            hidden, addend = layer(hidden, addend, rotations, context)
        return self.ops.add_norm(hidden, addend, self.norm)[1]

    def compute_logits(self, hidden: torch.Tensor, token_indices: torch.Tensor) -> torch.Tensor | None:
        """Return float32 logits [len(token_indices), vocab_size] on rank 0, None on the others.

        Args:
            hidden: [num_tokens, hidden_size].
            token_indices: int64, the tokens of ``hidden`` whose logits are wanted.
        """
        logits = self.parallel.gather_columns(self.lm_head(hidden.index_select(0, token_indices)))
        if logits is None:
            return None
        logits, softcap = logits.float(), self.config.logits_softcap
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        # Drop the padding of the last rank's part. Dropped before a conversion, it would leave one row with another
        # stride than several rows have, and a GPU would compile its kernels for that stride too.
        return logits[:, : self.config.vocab_size]
