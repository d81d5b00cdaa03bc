"""CpuMtpHead: a layer of multi-token prediction, computed by the C kernels on packed weights.

Of token t at position p it reads the embedding, and the hidden state h that the model has after the token before it:

    projection(concat(embedding_norm(embedding of t), hidden_norm(h)))  ->  decoder layer at position p - 1  ->  norm

The logits of the result, by the head of the model, are those of the token after t. The result takes the place of the
model's hidden state, which is after its last norm too, where this is not known yet: so one layer drafts several tokens.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from engine.models.config.model_config import ModelConfig
from engine.models.decoder.coded_plan import NO_CODES, CodedPlan
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.decoder.forward_context import ForwardContext
from engine.models.mtp.hidden_state_head import HiddenStateHead
from engine.models.tensor_parallel import TensorParallel
from kernels.coded_weight import Weight
from kernels.cpu.linear import PackedLinear, WeightKind, linear

__all__ = ["CpuMtpHead", "own_shapes"]


def own_shapes(size: int) -> dict[str, list[int]]:
    """Return the shapes of the parameters that a decoder of one layer lacks, by name; hidden states have ``size``."""
    return {"embedding_norm.weight": [size], "hidden_norm.weight": [size], "projection.weight": [size, 2 * size]}


class CpuMtpHead(HiddenStateHead):
    """A model of one layer, which shares the embedding, the head and the tables of RoPE with the model ``target``.

    Args:
        target: the model for which it drafts.
        config: what ``mtp_config`` returns.
        dtype: of the KV cache.
        kind: the type of the linear layers' packed weights.
        hidden_first: the projection reads the hidden state before the embedding.
        plan: which weights stay codes; not that of the projection.
    """

    def __init__(
        self,
        target: CpuDecoder,
        config: ModelConfig,
        dtype: torch.dtype,
        kind: WeightKind,
        *,
        hidden_first: bool,
        plan: CodedPlan = NO_CODES,
    ) -> None:
        super().__init__(target.embed_tokens, config, target.rope, TensorParallel(), dtype, kind, plan, target.lm_head)
        self._hidden_first = hidden_first
        self._projection = PackedLinear(kind, 2 * config.hidden_size, config.hidden_size)
        self._embedding_norm = self._hidden_norm = torch.empty(0)

    def set_weight(self, name: str, weight: Weight) -> None:
        """Set one parameter, by its name in decoder.py's Decoder or in ``own_shapes``."""
        match name:
            case "embedding_norm.weight":
                assert isinstance(weight, torch.Tensor)
                self._embedding_norm = self._norm_weight(weight)
            case "hidden_norm.weight":
                assert isinstance(weight, torch.Tensor)
                self._hidden_norm = self._norm_weight(weight)
            case "projection.weight":
                self._projection.set_weight(weight)
            case _:
                super().set_weight(name, weight)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that a pass reads, those of the shared head included."""
        return super().num_bytes + self._projection.num_bytes

    def predict(
        self, token_ids: torch.Tensor, hidden_states: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """See HiddenStateHead."""
        size, eps = (self.config.hidden_size,), self.config.rms_norm_eps
        embedding = F.rms_norm(self.embed(token_ids), size, self._embedding_norm, eps)
        hidden = F.rms_norm(hidden_states.float(), size, self._hidden_norm, eps)
        both = (hidden, embedding) if self._hidden_first else (embedding, hidden)
        return self.compute(linear(torch.cat(both, dim=1), self._projection), token_ids, positions, context)

    def next_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output after the last norm: the model's hidden states are after theirs, too."""
        return self.normed(hidden)
