"""DraftModel: a smaller model that guesses the next tokens of several sequences together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engine.sequence import Sequence

__all__ = ["DraftModel", "ModelDrafts"]


@dataclass(slots=True)
class ModelDrafts:
    """What a draft model has computed in one step.

    Attributes:
        token_ids: the draft of each sequence; it may be shorter than was asked for, or empty.
        passes: of each forward pass with what it sampled: its tokens, and its seconds.
    """

    token_ids: dict[Sequence, list[int]] = field(default_factory=dict)
    passes: list[tuple[int, float]] = field(default_factory=list)


class DraftModel(Protocol):
    """What the drafter knows of a draft model.

    It computes keys and values of its own for the tokens of a sequence, in the sequence's blocks. They may lag behind
    those of the large model, and are computed from the tokens when they are needed.
    """

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence that it drafts for, draft included."""

    @property
    def share(self) -> float:
        """The bytes of its weights divided by those of the large model: about how long it takes for a token."""

    @property
    def free_tokens(self) -> int | None:
        """Tokens that it computes in about the time of one; None: hundreds."""

    def num_computed(self, sequence: Sequence) -> int:
        """Return the leading tokens of a running sequence that it need not compute again."""

    def fill(self, ends: Mapping[Sequence, int], max_tokens: int | None = None) -> ModelDrafts:
        """Compute the tokens of sequences that it lacks, up to these of each, at most ``max_tokens``; draft nothing."""

    def draft(self, lengths: Mapping[Sequence, int]) -> ModelDrafts:
        """Compute the tokens that it lacks, and draft up to these numbers of tokens, for which there are blocks."""
