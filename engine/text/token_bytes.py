"""TokenBytes: the bytes of each token of a vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

__all__ = ["TokenBytes"]

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # how SentencePiece writes a token that is a byte


class TokenBytes:
    """A function from a token's id to its bytes, which remembers them.

    Args:
        tokenizer: of transformers.
        decode: ``Tokenizer.decode``.
    """

    def __init__(self, tokenizer: Any, decode: Callable[..., str]) -> None:
        self._tokenizer = tokenizer
        self._decode = decode
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of a token, also if they are only a part of a character.

        The bytes of a special token are its name. An id that the tokenizer does not have gives no bytes.
        """
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._bytes_of(token_id)
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id >= len(self._tokenizer):
            return b""
        token = str(self._tokenizer.convert_ids_to_tokens(token_id))
        text = self._decode([token_id], skip_special_tokens=False)
        if "\ufffd" in text:  # no whole characters
            if byte := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(byte[1], 16)])
            alphabet = _byte_level_alphabet()
            if all(character in alphabet for character in token):
                return bytes(alphabet[character] for character in token)
        # SentencePiece drops the space at the start of a text, and here each token is a text.
        return (" " + text if token.startswith("▁") and not text.startswith(" ") else text).encode()


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE tokens (the inverse of GPT-2's ``bytes_to_unicode``)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
