"""SpecialTokenMask: keeps special tokens that a user spells out in a message plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

__all__ = ["SpecialTokenMask", "texts_in"]

_PRIVATE_USE = range(0xF0000, 0x10FFFE)  # characters without a meaning: the placeholders


class SpecialTokenMask:
    """Replaces special tokens in messages by placeholders, which survive the chat template.

    Only the template then writes control tokens; after rendering, each placeholder is tokenised as plain text.

    Args:
        special_tokens: the longest first, since one may contain another.
        messages: of one conversation, and everything else that its template gets.

    Attributes:
        masked_messages: the messages with placeholders.
        token_of: placeholder (a private-use character that the messages do not have) to the special token.
    """

    def __init__(self, special_tokens: Sequence[str], messages: Sequence[Mapping[str, Any]]) -> None:
        used = {character for text in texts_in(messages) for character in text} if special_tokens else ()
        unused = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        placeholders = dict(zip(special_tokens, islice(unused, len(special_tokens)), strict=True))
        self.masked_messages: list[Any] = [_replace(message, placeholders) for message in messages]
        self.token_of = {placeholder: token for token, placeholder in placeholders.items()}


def texts_in(value: Any) -> Iterator[str]:
    """Yield each text in nested lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from texts_in(key)
            yield from texts_in(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from texts_in(inner)


def _replace(value: Any, replacements: dict[str, str]) -> Any:
    """Return ``value`` with the replacements made in each text of nested lists and mappings."""
    if isinstance(value, str):
        for old, new in replacements.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, Mapping):
        return {_replace(key, replacements): _replace(inner, replacements) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_replace(inner, replacements) for inner in value]
    return value
