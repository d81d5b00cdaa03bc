"""DraftLogits: from which logits drafts are sampled, to compare them with those of an oracle without a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import pytest
import torch

from engine.scheduling.drafting.draft_model import ModelDrafts
from engine.sequence import Sequence
from engine.worker.drafting.cpu_hidden_state_model import CpuHiddenStateModel


class DraftOracle(Protocol):
    """A model with a layer that drafts for it."""

    def let_agree(self) -> None:
        """Let drafts be right often, but not always."""

    def draft_logits(self, token_ids: list[int], num_drafted: int) -> torch.Tensor:
        """Return the logits of the next draft token of a sequence, whose last ``num_drafted`` tokens are the draft."""

    def save(self, path: Any) -> str:
        """Save the model; return its path."""

    def speculation(self, saved: str, num_tokens: int) -> dict[str, Any]:
        """Return the options of an engine of a saved model."""


def difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the largest difference of logits. Tokens that cannot be drafted are at -inf in both."""
    if not torch.equal(expected.isneginf(), found.isneginf()) or found.isnan().any():
        return torch.inf
    is_drafted = ~expected.isneginf()
    return float((expected - found)[is_drafted].abs().max())


class DraftLogits:
    """Records from which logits the drafts of every engine are sampled.

    Attributes:
        seen: the tokens of a sequence and its draft so far, how many of them are the draft, and the logits after them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[list[int], int, torch.Tensor]] = []
        self._num_passes = 0
        draft, sample = CpuHiddenStateModel.draft, CpuHiddenStateModel._sample

        def drafting(model: CpuHiddenStateModel, lengths: Mapping[Sequence, int]) -> ModelDrafts:
            self._num_passes = 0
            return draft(model, lengths)

        def sampling(model: CpuHiddenStateModel, logits: torch.Tensor, sequences: list[Sequence]) -> list[int | None]:
            for row, sequence in zip(logits, sequences, strict=True):
                self.seen.append((list(sequence.token_ids), self._num_passes, row.clone()))
            self._num_passes += 1
            return sample(model, logits, sequences)

        monkeypatch.setattr(CpuHiddenStateModel, "draft", drafting)
        monkeypatch.setattr(CpuHiddenStateModel, "_sample", sampling)

    def largest_error(self, oracle: DraftOracle, num_drafted: int) -> float:
        """Return the largest difference from the oracle's logits of the draft token with this index."""
        errors = [
            difference(oracle.draft_logits(token_ids, num_drafted), logits)
            for token_ids, drafted, logits in self.seen
            if drafted == num_drafted
        ]
        assert len(errors) >= 10
        return max(errors)
