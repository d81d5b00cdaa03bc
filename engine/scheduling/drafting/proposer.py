"""Proposer: guesses the next tokens of a sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod

from engine.sequence import Sequence, SequenceGroup

__all__ = ["Proposer"]


class Proposer(ABC):
    """Guesses the next tokens of a sequence. A wrong guess costs time, and changes no answer."""

    @abstractmethod
    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """Return up to ``limit`` tokens, or none."""

    def learn(self, group: SequenceGroup) -> None:  # noqa: B027  (most draft from the request alone)
        """Take in a request that has left the engine, for the drafts of later ones."""
