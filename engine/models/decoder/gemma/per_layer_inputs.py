"""PerLayerInputs and PerLayerInput: embeddings of each token for every layer, and how a layer adds its own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from engine.models.config.model_config import ModelConfig
from engine.models.config.values.rounded import rounded
from engine.models.decoder.norms import RMSNorm
from engine.models.decoder.parallel_layers import VocabParallelEmbedding
from engine.models.tensor_parallel import TensorParallel
from kernels.layer_ops.base import LayerOps

__all__ = ["PerLayerInput", "PerLayerInputs"]


class PerLayerInputs(nn.Module):
    """A token's inputs of all layers: an embedding of its id, and a projection of its usual embedding.

    Tensor-parallel ranks divide the embedding, which is large, and compute the rest alike.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel, ops: LayerOps) -> None:
        super().__init__()
        self.ops, self.width = ops, config.per_layer_width
        width = config.num_layers * self.width
        self.vocab_size = config.per_layer_vocab_size
        self.has_all_ids = self.vocab_size >= config.vocab_size
        self.embed_tokens_per_layer = VocabParallelEmbedding(self.vocab_size, width, parallel)
        self.per_layer_model_projection = nn.Linear(config.hidden_size, width, bias=False)
        self.per_layer_projection_norm = RMSNorm(config, self.width)
        self.projection_scale = config.hidden_size**-0.5

    def forward(self, token_ids: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the inputs [num_tokens, num_layers, width].

        Args:
            token_ids: [num_tokens].
            embeddings: [num_tokens, hidden_size], the usual ones of these tokens.
        """
        if not self.has_all_ids:
            token_ids = token_ids.masked_fill(token_ids >= self.vocab_size, 0)
        of_ids: torch.Tensor = self.embed_tokens_per_layer(token_ids)
        of_ids = of_ids * rounded(self.width**0.5, of_ids.dtype)  # as it was in training
        projected = (self.per_layer_model_projection(embeddings) * self.projection_scale).view(-1, self.width)
        _, normed = self.ops.add_norm(projected, None, self.per_layer_projection_norm)
        inputs: torch.Tensor = (normed.view_as(of_ids) + of_ids) * 2.0**-0.5
        return inputs.view(len(token_ids), -1, self.width)


class PerLayerInput(nn.Module):
    """What a layer adds to the residual stream: its own input of each token, gated by the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.activation == "gelu_tanh"
        self.gate = nn.Linear(config.hidden_size, config.per_layer_width, bias=False)
        self.projection = nn.Linear(config.per_layer_width, config.hidden_size, bias=False)

    def forward(self, residual: torch.Tensor, own_input: torch.Tensor) -> torch.Tensor:
        """Return what is added, [num_tokens, hidden_size], of ``own_input`` [num_tokens, width]."""
        gated = F.gelu(self.gate(residual), approximate="tanh") * own_input
        added: torch.Tensor = self.projection(gated)
        return added
