"""HiddenStateHead: a layer that drafts from the hidden states of a model, whatever it reads of them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.decoder.forward_context import ForwardContext

__all__ = ["HiddenStateHead"]


class HiddenStateHead(CpuDecoder, ABC):
    """A model of one layer, which reads a token and the hidden state after the token before it."""

    @abstractmethod
    def predict(
        self, token_ids: torch.Tensor, hidden_states: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Return the layer's output before its last norm, float32 [num_tokens, hidden_size].

        Args:
            token_ids: int64 [num_tokens].
            hidden_states: [num_tokens, hidden_size], after the token before each of them.
            positions: int64 [num_tokens], of these tokens before.
            context: of the pass; its slots are those of ``positions``.
        """

    @abstractmethod
    def next_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what takes the place of the model's hidden states where these are not known yet.

        Args:
            hidden: what ``predict`` returned of some tokens.
        """
