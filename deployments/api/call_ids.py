"""The ids of tool calls, in the form that a model's chat template takes."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from deployments.parsers.events import CallStart

__all__ = ["RANDOM_IDS", "CallIds", "NewId"]

MAX_BARE_LENGTH = 9  # of Mistral's templates, which reject other ids; such ids have no room for a prefix
_ALPHABET = string.ascii_letters + string.digits
NewId = Callable[[CallStart], str]


@dataclass(frozen=True)
class CallIds:
    """Makes the ids of an answer's calls. An id that the model has written is kept.

    Attributes:
        length: characters of an id.
        first_index: calls of the conversation so far, if ids are Kimi's ``functions.name:index``; None for random ids.
    """

    length: int = 29
    first_index: int | None = None

    def of(self, call: CallStart, index: int, prefix: str) -> str:
        """Return the id of an answer's call.

        Args:
            call: it.
            index: its number in the answer, from 0.
            prefix: by which an API's clients know a call; a random id begins with it, unless it is too short.
        """
        if call.call_id is not None:
            return call.call_id
        if self.first_index is not None:
            return f"functions.{call.name}:{self.first_index + index}"
        start = prefix if self.length > MAX_BARE_LENGTH else ""
        return start + "".join(secrets.choice(_ALPHABET) for _ in range(self.length - len(start)))

    def counter(self, prefix: str) -> NewId:
        """Return what makes the ids of one answer's calls, in their order."""
        numbers = count()
        return lambda call: self.of(call, next(numbers), prefix)


RANDOM_IDS = CallIds()
