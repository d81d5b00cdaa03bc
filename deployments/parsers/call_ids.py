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
    """Makes the ids of an answer's calls. No id is used twice in a conversation.

    An id that the model has written is kept, unless an earlier call has it: clients find a call's result by its id.

    Attributes:
        length: characters of a random id.
        first_index: calls of the conversation so far, if ids are Kimi's ``functions.name:index``; None for random ids.
        earlier: the ids of those calls.
    """

    length: int = 29
    first_index: int | None = None
    earlier: frozenset[str] = frozenset()

    def counter(self, prefix: str) -> NewId:
        """Return what makes the ids of one answer's calls, in their order.

        Args:
            prefix: by which an API's clients know a call; a random id begins with it, unless it is too short.
        """
        if self.first_index is None:
            return lambda _: self._random(prefix)
        indices, used = count(self.first_index), set(self.earlier)

        def new_id(call: CallStart) -> str:
            index = next(indices)
            call_id = call.call_id
            if call_id is None or call_id in used:
                ids = (f"functions.{call.name}:{number}" for number in count(index))
                call_id = next(unused for unused in ids if unused not in used)
            used.add(call_id)
            return call_id

        return new_id

    def _random(self, prefix: str) -> str:
        start = prefix if self.length > MAX_BARE_LENGTH else ""
        return start + "".join(secrets.choice(_ALPHABET) for _ in range(self.length - len(start)))


RANDOM_IDS = CallIds()
