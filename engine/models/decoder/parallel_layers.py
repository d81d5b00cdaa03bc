"""RowParallelLinear and VocabParallelEmbedding: layers whose outputs tensor-parallel ranks sum."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from engine.models.checkpoint.sharding import vocab_range
from engine.models.tensor_parallel import TensorParallel

__all__ = ["RowParallelLinear", "VocabParallelEmbedding"]


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
