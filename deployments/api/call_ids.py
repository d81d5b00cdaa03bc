"""The ids of tool calls, in the form that a model's chat template takes."""

from __future__ import annotations

import secrets
import string

__all__ = ["new_call_id"]

MAX_BARE_LENGTH = 9  # of Mistral's templates, which reject other ids; such ids have no room for a prefix
_ALPHABET = string.ascii_letters + string.digits


def new_call_id(prefix: str, length: int) -> str:
    """Return the id of a call for a template that takes ids of ``length`` characters.

    It begins with ``prefix``, by which an API's clients know a call, unless it is too short.
    """
    start = prefix if length > MAX_BARE_LENGTH else ""
    return start + "".join(secrets.choice(_ALPHABET) for _ in range(length - len(start)))
