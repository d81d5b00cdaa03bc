"""ReasoningTokens: how many tokens of one answer are reasoning, as the usage of a response reports them."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.parsers.answer_parser import AnswerParser
from deployments.parsers.events import Reasoning

__all__ = ["ReasoningTokens"]


class ReasoningTokens:
    """Counts the tokens of one answer's reasoning, with its markers, while the answer is parsed.

    Reasoning that a single token ends is counted exactly. Otherwise, the tokens of a piece count as the text with which
    the piece ends, and those before the first text as that text.

    Args:
        end_of_reasoning: id of the token that ends the reasoning; None if no single token does.

    Attributes:
        total: tokens of reasoning so far.
    """

    def __init__(self, end_of_reasoning: int | None) -> None:
        self._end = end_of_reasoning
        self._num_tokens = 0
        self._num_held = 0  # tokens whose text has made no event yet
        self._end_at: int | None = None  # number of tokens up to the end of reasoning
        self._by_piece = 0
        self._parser: AnswerParser | None = None

    @property
    def total(self) -> int:
        """Tokens of reasoning so far."""
        if self._parser is None or not self._parser.has_reasoning:
            return 0
        return self._by_piece if self._end_at is None else self._end_at

    def add(self, token_ids: Sequence[int], parser: AnswerParser) -> None:
        """Count the tokens of a piece whose text ``parser`` has just been fed."""
        self._parser = parser
        if self._end_at is None and self._end is not None and self._end in token_ids:
            self._end_at = self._num_tokens + list(token_ids).index(self._end) + 1
        self._num_tokens += len(token_ids)
        self._num_held += len(token_ids)
        if parser.kind is not None:
            self._by_piece += self._num_held if parser.kind is Reasoning else 0
            self._num_held = 0
