"""RowParallelLinear and the embeddings of a part of the vocabulary: layers whose outputs tensor-parallel ranks sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from engine.models.checkpoint.sharding import vocab_range
from engine.models.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from kernels.linear.coded_triton import CodedTritonLinear

__all__ = ["CodedVocabEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]


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
        return _look_up(self, token_ids, lambda own_ids: F.embedding(own_ids, self.weight))


class CodedVocabEmbedding(nn.Module):
    """A VocabParallelEmbedding whose weight stays codes; a tied head computes with them, too.

    Args:
        plain: the embedding that it replaces.
        codes: its weight.
        dtype: of the rows that are looked up.
    """

    def __init__(self, plain: VocabParallelEmbedding, codes: CodedTritonLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.first_id, self.num_embeddings, self.parallel = plain.first_id, plain.num_embeddings, plain.parallel
        self.codes, self.dtype = codes, dtype

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens] to [num_tokens, hidden_size]."""
        return _look_up(self, token_ids, lambda own_ids: self.codes.look_up(own_ids, self.dtype))

    def compile_kernels(self) -> None:
        """Launch what any number of tokens launches."""
        device = next(self.codes.parameters()).device
        self.codes.look_up(torch.zeros(1, dtype=torch.int64, device=device), self.dtype)


def _look_up(
    embedding: VocabParallelEmbedding | CodedVocabEmbedding,
    token_ids: torch.Tensor,
    look_up: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return rows of the whole vocabulary, [num_tokens, hidden_size], from ``look_up`` of the rank's own part."""
    if embedding.parallel.size == 1:
        return look_up(token_ids)
    own_ids = token_ids - embedding.first_id
    foreign = (own_ids < 0) | (own_ids >= embedding.num_embeddings)
    own = look_up(own_ids.masked_fill(foreign, 0)).masked_fill(foreign.unsqueeze(1), 0)
    return embedding.parallel.all_reduce(own)
