"""CpuLayerInputs: what PerLayerInputs computes, by the C kernels on packed weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from engine.models.config.model_config import ModelConfig
from engine.models.config.values.rounded import rounded
from engine.models.decoder.parallel_layers import VocabParallelEmbedding
from engine.models.tensor_parallel import TensorParallel
from kernels.cpu.gather import gather_rows
from kernels.cpu.linear import PackedLinear, WeightKind, linear

__all__ = ["CpuLayerInputs"]


class CpuLayerInputs:
    """A token's inputs of all layers, in float32; the embedding of ids may stay mapped from its file."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, dtype: torch.dtype, kind: WeightKind) -> None:
        self._width, self._parallel, self._eps = config.per_layer_width, parallel, config.rms_norm_eps
        width = config.num_layers * self._width
        with torch.device("meta"):
            self._embedding = VocabParallelEmbedding(config.per_layer_vocab_size, width, parallel)
        self._vocab_size = config.per_layer_vocab_size
        self._has_all_ids = self._vocab_size >= config.vocab_size
        self._projection = PackedLinear(kind, config.hidden_size, width)
        self._norm = torch.empty(0)
        self._scales = rounded(self._width**0.5, dtype), config.hidden_size**-0.5

    @property
    def num_bytes(self) -> int:
        """Bytes that the packed weights take."""
        return self._projection.num_bytes

    def set_weight(self, module: str, weight: torch.Tensor) -> None:
        """Set the weights of a module of PerLayerInputs, by its name there."""
        match module:
            case "embed_tokens_per_layer":
                self._embedding.weight = nn.Parameter(weight, requires_grad=False)
            case "per_layer_model_projection":
                self._projection.set_weight(weight)
            case "per_layer_projection_norm":
                self._norm = weight.float()
            case _:
                raise AssertionError(f"no module is called {module}")

    def __call__(self, token_ids: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the inputs of each layer, float32 [num_layers, num_tokens, width].

        Args:
            token_ids: [num_tokens].
            embeddings: float32 [num_tokens, hidden_size], the usual ones of these tokens.
        """
        of_ids, of_projection = self._scales
        if not self._has_all_ids:
            token_ids = token_ids.masked_fill(token_ids >= self._vocab_size, 0)
        if self._parallel.size == 1:
            embedded = gather_rows(self._embedding.weight, token_ids, of_ids)
        else:
            embedded = self._embedding(token_ids).float() * of_ids  # which also sums over the ranks
        projected = linear(embeddings, self._projection).view(-1, self._width) * of_projection
        normed = F.rms_norm(projected, (self._width,), self._norm, self._eps)
        inputs: torch.Tensor = (normed.view_as(embedded) + embedded) * 2.0**-0.5
        return inputs.view(len(token_ids), -1, self._width).transpose(0, 1).contiguous()
