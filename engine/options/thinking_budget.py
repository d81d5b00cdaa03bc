"""ThinkingBudget: the maximum number of tokens of reasoning, and the tokens around it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from engine.errors import RequestError
from engine.options.rules import is_integer

__all__ = ["ENDED", "MAX_INT32", "NOT_STARTED", "ThinkingBudget"]

MAX_INT32 = 2**31 - 1
# What stands for a number of tokens of reasoning:
NOT_STARTED = -1
ENDED = -2


class ThinkingBudget(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The maximum number of tokens of reasoning, and the tokens around it.

    The state of a sequence is a pure function of its output, so a budget holds after a preemption and on another
    replica.

    Attributes:
        num_tokens: tokens after the start of the reasoning; then its end is generated, whatever its probability.
        end_token_id: the token that ends reasoning.
        start_token_id: the token that starts it, once; None: the prompt ends within the reasoning.

    Raises:
        RequestError: for a value that is not an integer of at least 0.
    """

    num_tokens: int
    end_token_id: int
    start_token_id: int | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        for value in (self.num_tokens, *self.token_ids):
            if not is_integer(value) or not 0 <= value <= MAX_INT32:
                remedy = f"give integers of 0 to {MAX_INT32}"
                raise RequestError("is out of range", param="thinking_budget", value=value, remedy=remedy)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids that must be in the vocabulary."""
        return (self.end_token_id,) if self.start_token_id is None else (self.end_token_id, self.start_token_id)

    def num_thinking_tokens(self, output: Sequence[int]) -> int:
        """Return the tokens of reasoning so far, NOT_STARTED before them, or ENDED."""
        start = 0
        if self.start_token_id is not None:
            start = _after(output, self.start_token_id, 0)
            if start < 0:
                return NOT_STARTED
        return len(output) - start if _after(output, self.end_token_id, start) < 0 else ENDED


def _after(token_ids: Sequence[int], wanted: int, start: int) -> int:
    """Return the index after the first ``wanted`` from ``start`` on; -1 if there is none."""
    try:
        return token_ids.index(wanted, start) + 1
    except ValueError:
        return -1
