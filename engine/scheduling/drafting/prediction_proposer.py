"""PredictionProposer: draft tokens from the text that the client expects as the answer (OpenAI's ``prediction``).

An edit repeats most of a known text. The proposer follows the answer through that text: while they agree it proposes
what comes next there. After a difference it looks for the answer's last two tokens, first in what it has not passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from engine.scheduling.drafting.proposer import Proposer
from engine.sequence import Sequence

__all__ = ["PredictionProposer"]

_MOST_SEARCHED = 4096  # tokens of the text in each direction: tens of microseconds


@dataclass(slots=True)
class _Position:
    """Where an answer is in its predicted text."""

    num_seen: int  # tokens of the sequence
    next_index: int = 0  # of the text, after the last token that agreed
    is_aligned: bool = True


class PredictionProposer(Proposer):
    """Follows each sequence through the predicted text of its request; proposes nothing for others."""

    def __init__(self) -> None:
        self._positions: WeakKeyDictionary[Sequence, _Position] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """Return up to ``limit`` tokens of the predicted text; none if the answer is elsewhere."""
        text = sequence.group.request.prediction_token_ids
        if not text:
            return []
        position = self._positions.get(sequence)
        if position is None:
            position = self._positions[sequence] = _Position(sequence.num_prompt_tokens)
        _follow(position, text, sequence)
        return text[position.next_index :][:limit] if position.is_aligned else []


def _follow(position: _Position, text: list[int], sequence: Sequence) -> None:
    """Move the position by the tokens that the sequence has got since it was last asked."""
    token_ids = sequence.token_ids
    for token_id in token_ids[position.num_seen :]:
        position.is_aligned = (
            position.is_aligned and position.next_index < len(text) and text[position.next_index] == token_id
        )
        position.next_index += position.is_aligned
    position.num_seen = len(token_ids)
    if not position.is_aligned and sequence.num_output_tokens > 1:
        start = position.next_index
        next_index = _find(text, token_ids[-2:], start, start + _MOST_SEARCHED) or _find(
            text, token_ids[-2:], max(0, start - _MOST_SEARCHED), start
        )
        if next_index:
            position.next_index, position.is_aligned = next_index, True


def _find(text: list[int], pair: list[int], start: int, end: int) -> int:
    """Return the index after the first occurrence of two tokens between these indices; 0 if there is none."""
    first, second = pair
    index = max(start, 1)
    while True:
        try:
            index = text.index(second, index, end)
        except ValueError:
            return 0
        if text[index - 1] == first:
            return index + 1
        index += 1
