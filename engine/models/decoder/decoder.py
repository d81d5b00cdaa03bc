"""The decoder: one config-driven model for the checkpoints of all families in config/families/table.py.

Tokens are packed: the tokens of all sequences of a step are one tensor, ``[num_tokens, hidden_size]``. Only attention
and recurrent layers distinguish sequences, through the step's ForwardContext. Linear layers that read the same input
are fused. Tensor-parallel ranks compute the same tokens, each with its own heads, features and part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import repeat

import torch
from torch import nn

from engine.models.config.model_config import ModelConfig
from engine.models.decoder.attention import Attention
from engine.models.decoder.feed_forward import feed_forward
from engine.models.decoder.forward_context import ForwardContext
from engine.models.decoder.gemma.altup import AltUp, ResidualStreams
from engine.models.decoder.gemma.laurel import LAUREL_SCALE, Laurel
from engine.models.decoder.gemma.per_layer_inputs import PerLayerInput, PerLayerInputs
from engine.models.decoder.latent_attention import LatentAttention
from engine.models.decoder.norms import RMSNorm, norm_if
from engine.models.decoder.parallel_layers import CodedVocabEmbedding, VocabParallelEmbedding
from engine.models.decoder.query_growth import growth_factors
from engine.models.decoder.recurrent.layer import RecurrentLayer, recurrent_layer
from engine.models.tensor_parallel import TensorParallel
from kernels.layer_ops.base import Addend, LayerOps, Rotation
from kernels.recurrent.base import RecurrentOps
from kernels.recurrent.reference import ReferenceOps

__all__ = ["Decoder"]


class DecoderLayer(nn.Module):
    """What mixes tokens, and a feed-forward, each with norms before, after or around it and added to its input.

    Most layers have both halves; tokens are mixed by attention, by a recurrence, or by both side by side.

    The next layer, or the last norm, adds what the feed-forward returns: the sum and the norm after it are one kernel.
    """

    self_attn: Attention | LatentAttention | None
    recurrent: RecurrentLayer | None
    mlp: nn.Module | None

    def __init__(
        self, config: ModelConfig, layer: int, parallel: TensorParallel, ops: LayerOps, recurrent_ops: RecurrentOps
    ) -> None:
        super().__init__()
        self.ops = ops
        mixer, has_feed_forward = config.mixers[layer], config.has_feed_forward(layer)
        width, norms = config.hidden_size, config.recurrent_norms if mixer == "recurrent" else config.norms
        has_input_norms, has_output_norms = norms != "after", norms != "before"
        self.rope_table = config.rope.tables[layer]
        self.residual_multiplier = config.residual_multiplier
        self.input_layernorm = norm_if(has_input_norms and mixer != "none", config, width)
        attention = Attention if config.latent is None else LatentAttention
        self.self_attn = attention(config, layer, parallel, ops) if mixer in ("attention", "both") else None
        self.recurrent = recurrent_layer(config, layer, parallel, recurrent_ops)
        self.attention_output_norm = norm_if(has_output_norms and mixer != "none", config, width)
        has_mlp_norm = has_input_norms and has_feed_forward and not config.norms_inside(layer)
        self.post_attention_layernorm = norm_if(has_mlp_norm, config, width)  # before the MLP
        self.mlp = feed_forward(config, layer, parallel, ops) if has_feed_forward else None
        self.mlp_output_norm = norm_if(has_output_norms and has_feed_forward, config, width)
        self.per_layer_input = PerLayerInput(config) if config.per_layer_width else None
        self.per_layer_output_norm = norm_if(self.per_layer_input is not None, config, width)
        self.layer_scalar = nn.Parameter(torch.empty(1), False) if config.has_layer_scalars else None  # of the output
        self.altup = None if config.altup is None else AltUp(config, config.altup, ops)
        self.laurel = None if config.altup is None else Laurel(config, config.altup.laurel_rank, ops)

    def forward(
        self,
        residual: torch.Tensor,
        addend: Addend | None,
        rotations: Sequence[Rotation],
        context: ForwardContext,
        own_input: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Addend | None]:
        """Compute the layer.

        Args:
            residual: [num_tokens, hidden_size]; of several streams [num_streams, num_tokens, hidden_size].
            addend: what the layer before adds to it; to several streams nothing.
            rotations: of every table.
            context: of the step.
            own_input: [num_tokens, per_layer_width], if the model has such.

        Returns:
            The residual stream before the last part of the layer, and what that part adds to it.
        """
        if self.altup is not None:
            return self._compute_streams(self.altup, residual, rotations, context, own_input), None
        residual, addend = self._compute_halves(residual, addend, rotations, context)
        if self.per_layer_input is not None:
            residual, _ = self.ops.add_norm(residual, addend, None)
            addend = Addend(self.per_layer_input(residual, own_input), self.per_layer_output_norm)
        if self.layer_scalar is not None:
            assert addend is not None  # every such layer has a feed-forward
            addend = replace(addend, sum_scale=self.layer_scalar)
        return residual, addend

    def _compute_streams(
        self,
        altup: AltUp,
        streams: torch.Tensor,
        rotations: Sequence[Rotation],
        context: ForwardContext,
        own_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the layer on one of several residual streams, and correct all of them."""
        predictions = altup.predict(streams)
        halves = self._compute_halves(predictions[altup.shape.active], None, rotations, context)
        streams = altup.correct(predictions, self.ops.add_norm(*halves, None)[0])
        if self.per_layer_input is not None:
            added = self.per_layer_input(altup.output(streams), own_input)
            streams[1:] += self.ops.add_norm(added, None, self.per_layer_output_norm)[1]
        return streams

    def _compute_halves(
        self, residual: torch.Tensor, addend: Addend | None, rotations: Sequence[Rotation], context: ForwardContext
    ) -> tuple[torch.Tensor, Addend | None]:
        """Mix the tokens and compute the feed-forward; arguments and results are those of ``forward``."""
        if self.self_attn is not None or self.recurrent is not None:
            residual, hidden = self.ops.add_norm(residual, addend, self.input_layernorm)
            mixed = self._mix_tokens(hidden, rotations, context)
            addend = Addend(mixed, self.attention_output_norm, self.residual_multiplier)
            if self.laurel is not None:
                residual = (residual + self.laurel(hidden)) * LAUREL_SCALE
                addend = replace(addend, scale=LAUREL_SCALE)
        if self.mlp is not None:
            residual, hidden = self.ops.add_norm(residual, addend, self.post_attention_layernorm)
            addend = Addend(self.mlp(hidden), self.mlp_output_norm, self.residual_multiplier)
        return residual, addend

    def _mix_tokens(self, hidden: torch.Tensor, rotations: Sequence[Rotation], context: ForwardContext) -> torch.Tensor:
        if self.self_attn is None:
            assert self.recurrent is not None
            mixed: torch.Tensor = self.recurrent(hidden, context)
            return mixed
        rotation = None if self.rope_table is None else rotations[self.rope_table]
        attended: torch.Tensor = self.self_attn(hidden, rotation, context)
        return attended if self.recurrent is None else attended + self.recurrent(hidden, context)


class Decoder(nn.Module):
    """A decoder-only language model.

    Args:
        config: the whole model's shape.
        rope: tables of the cosines and sines of every position it may see, float32 [length, 2, head_dim // 2].
        parallel: this rank and its group.
        ops: the layers' operations, on the device of the weights.
        recurrent_ops: those of recurrent layers; None: torch's.

    Attributes:
        attention: the shape of this rank's attention layers.
        layer_caches: what the layers cache on this rank, one after another.
    """

    def __init__(
        self,
        config: ModelConfig,
        rope: Sequence[torch.Tensor],
        parallel: TensorParallel,
        ops: LayerOps,
        recurrent_ops: RecurrentOps | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.parallel, self.ops = parallel, ops
        own = config.shard(parallel.size)
        self.attention, self.layer_caches = own.attention, own.layer_caches
        self.embed_tokens: VocabParallelEmbedding | CodedVocabEmbedding
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parallel)
        self.per_layer_inputs = PerLayerInputs(config, parallel, ops) if config.per_layer_width else None
        self.streams = None if config.altup is None else ResidualStreams(config, config.altup)
        recurrent_ops = recurrent_ops or ReferenceOps()
        self.layers = nn.ModuleList(
            DecoderLayer(own, layer, parallel, ops, recurrent_ops) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, self.embed_tokens.num_embeddings, bias=False)
        self.rope = list(rope)

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
        if self.config.query_growth is not None:
            factors = growth_factors(self.config.query_growth, positions)
            context = replace(context, query_factors=factors.view(-1, 1, 1))
        own_inputs: Iterable[torch.Tensor | None] = repeat(None, len(self.layers))
        if self.per_layer_inputs is not None:
            own_inputs = self.per_layer_inputs(token_ids, hidden).unbind(1)
        if self.streams is not None:
            hidden = self.streams.start(hidden)
        addend: Addend | None = None
        for layer, own_input in zip(self.layers, own_inputs, strict=True):
            hidden, addend = layer(hidden, addend, rotations, context, own_input)
        if self.streams is not None:
            hidden = self.streams.merge(hidden)
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
